"""What the documentation has its reader run before a fleet, and what it says will happen."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from configs.deployment.sample_request import write_image_request
from tests.docs.before_a_fleet import lines, run
from tests.e2e.fleet import MODEL, ROOT, Frontend


def test_every_command_works(frontend: Frontend, tmp_path: Path) -> None:
    (tmp_path / ".demo").mkdir()
    write_image_request(tmp_path / ".demo" / "request.json", MODEL)
    foveal = [sys.executable, "-m", "configs"]
    asked, workers = [], frontend.workers()
    for line in lines(frontend.url, foveal, sys.executable):
        said = run(line, tmp_path, {"PYTHONPATH": str(ROOT), "COLUMNS": "200"})
        if line.arguments[0] == "curl":
            asked.append(dict(re.findall(r"^(x-foveal-[a-z-]+): (.*?)\r?$", said, re.M)))
            frontend.settle()
        elif "status" in line.arguments:
            assert all(name in said for name in workers)
        elif "bench" in line.arguments:
            assert re.search(r"errors +│ +0 of 40 ", said), said
    # The page promises that the second answer comes from where the first one was computed.
    first, second = asked
    assert first["x-foveal-worker"] == second["x-foveal-worker"]
    assert second["x-foveal-overlap-blocks"] == second["x-foveal-prompt-blocks"] != "0"
    assert second["x-foveal-transfer"] == "shm"
