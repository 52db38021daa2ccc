"""A process does not outlive its parent, however that ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.fakes import PATIENCE

ROOT = Path(__file__).parents[2]
Start = Callable[..., tuple[subprocess.Popen[str], int]]
"""Returns the parent, and a descriptor of its child."""

# A parent whose child says when it has asked to die with it.
TREE = """
    import multiprocessing, os, sys, time
    from transfer.parent_death import die_with_parent

    def child():
        if "orphan" in sys.argv:
            print(os.getpid(), flush=True)
            while os.getppid() == multiprocessing.parent_process().pid:
                time.sleep(0.01)
        die_with_parent()
        print(os.getpid(), flush=True)
        time.sleep(600)

    if __name__ == "__main__":
        process = multiprocessing.get_context(sys.argv[1]).Process(target=child)
        process.start()
        process.join()
"""


@pytest.fixture(params=["spawn", "fork"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Start]:
    """Start the tree; what it is called with is told to its child."""
    script = tmp_path / "tree.py"
    script.write_text(textwrap.dedent(TREE))
    with ExitStack() as started:

        def start(*words: str) -> tuple[subprocess.Popen[str], int]:
            parent = subprocess.Popen(
                [sys.executable, str(script), request.param, *words],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                text=True,
            )
            started.enter_context(parent)
            started.callback(parent.kill)
            assert parent.stdout is not None
            child = os.pidfd_open(int(parent.stdout.readline()))
            started.callback(_end, child)
            return parent, child

        yield start


def _end(child: int) -> None:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(child, signal.SIGKILL)
    os.close(child)


def has_ended(child: int, seconds: float) -> bool:
    return select.select([child], [], [], seconds)[0] == [child]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=lambda s: s.name)
def test_a_child_dies_with_its_parent(start: Start, how: signal.Signals) -> None:
    parent, child = start()
    assert not has_ended(child, 0)
    parent.send_signal(how)
    assert has_ended(child, PATIENCE)


def test_a_child_that_asks_when_its_parent_is_dead_dies_at_once(start: Start) -> None:
    parent, child = start("orphan")
    parent.kill()
    assert has_ended(child, PATIENCE)
