"""A process does not outlive its parent, however that ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.fakes import PATIENCE

ROOT = Path(__file__).parents[2]

# A parent whose child says when it has asked to die with it.
TREE = """
    import multiprocessing, os, time
    from transfer.parent_death import die_with_parent

    def child():
        die_with_parent()
        print(os.getpid(), flush=True)
        time.sleep(600)

    if __name__ == "__main__":
        process = multiprocessing.get_context("spawn").Process(target=child)
        process.start()
        process.join()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=lambda s: s.name)
def test_a_child_dies_with_its_parent(tmp_path: Path, how: signal.Signals) -> None:
    script = tmp_path / "tree.py"
    script.write_text(textwrap.dedent(TREE))
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        try:
            assert select.select([child], [], [], 0)[0] == []
            parent.send_signal(how)
            # Readable when it has ended.
            assert select.select([child], [], [], PATIENCE)[0] == [child]
        finally:
            os.close(child)
