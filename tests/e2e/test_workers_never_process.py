"""Workers get processed tensors; no worker runs a Hugging Face processor for a request.

For the whole session the workers run with ``processor_trap``: once they are up, a call of
a processor in any process of theirs raises. So every test with pictures shows it; here is
shown that the trap is set.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.cases import CHAT, chat_body, shown, user
from tests.e2e.conftest import TRAP, SessionFleet
from tests.e2e.fleet import ROOT, Frontend
from tests.e2e.pictures import pattern

CALL_A_PROCESSOR = """
import sys
from PIL import Image
from transformers import AutoProcessor

processor = AutoProcessor.from_pretrained(sys.argv[1])
part = getattr(processor, sys.argv[2]) if sys.argv[2] != "whole" else processor
picture = Image.new("RGB", (56, 56))
part(images=picture, **({"text": "<|image_pad|>"} if part is processor else {}))
"""


def test_every_process_of_every_worker_has_the_trap(
    session_fleet: SessionFleet, trap_directory: Path
) -> None:
    lines = (trap_directory / "processors-trapped").read_text().splitlines()
    trapped = {int(pid) for pid, _ in map(str.split, lines)}
    for worker in session_fleet.workers:
        # The worker itself, its engine and its model runner.
        assert len(trapped.intersection(worker.family())) >= 3
        assert worker.pid in trapped
    assert (trap_directory / "processors-forbidden").exists()


@pytest.mark.parametrize("part", ["whole", "image_processor"])
def test_a_processor_called_in_the_trap_raises(
    part: str, tmp_path: Path, checkpoint: Path
) -> None:
    env = {
        **os.environ, "PYTHONPATH": str(TRAP), "FOVEAL_PROCESSOR_TRAP": str(tmp_path)
    }
    (tmp_path / "processors-forbidden").touch()
    call = subprocess.run(
        [sys.executable, "-c", CALL_A_PROCESSOR, str(checkpoint), part],
        env=env, cwd=ROOT, capture_output=True, text=True, check=False,
    )
    assert call.returncode != 0
    assert "called in process" in call.stderr


def test_workers_in_the_trap_answer_about_pictures_that_are_new(frontend: Frontend) -> None:
    pictures = [shown(pattern(400, 400, 4000 + number)) for number in range(8)]
    bodies = [chat_body(user(picture, "What is it?")) for picture in pictures]
    # All at once, so that one worker will not do.
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(lambda body: frontend.ask(CHAT, body), bodies))
    assert {answer.headers["x-foveal-transfer"] for answer in answers} == {"shm"}
    served = {answer.headers["x-foveal-worker"] for answer in answers}
    assert served == frontend.workers().keys()
