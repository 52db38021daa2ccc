"""``make newcomer``: follows the documentation to the letter, in a fresh clone.

Clones the last commit into an empty directory, installs and serves by `make serve` there,
runs every command of the documentation that can be run on such a machine, ends the fleet by
Ctrl-C, and looks for what it may have left.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.docs.before_a_fleet import DOCUMENTED_URL, lines, run
from tests.docs.pages import ROOT
from tests.e2e.processes import Process, wait_until

SERVE_SECONDS = 1200.0
STOP_SECONDS = 60.0
PLAIN = {"COLUMNS": "200"}


def main() -> int:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="foveal-newcomer-") as directory:
        clone = Path(directory, "foveal")
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        before = left_by_fleets()
        with make_serve(clone, Path(directory, "serve.log")):
            for line in lines(DOCUMENTED_URL, [".venv/bin/foveal"], ".venv/bin/python"):
                said = run(line, clone, PLAIN)
                print(f"\n$ {' '.join(line.arguments)}    # {line.where}\n{said}", flush=True)
        assert left_by_fleets() == before, f"left: {left_by_fleets() - before}"
        status = subprocess.run(
            ["git", "status", "--short"], cwd=clone, capture_output=True, text=True, check=True
        )
        assert not status.stdout, f"the clone has new files:\n{status.stdout}"
        tests = [".venv/bin/python", "-m", "pytest", "-q", "tests/docs"]
        subprocess.run(tests, cwd=clone, check=True)
    print(f"Everything that the pages say works; {time.monotonic() - began:.0f} s")
    return 0


@contextmanager
def make_serve(clone: Path, log: Path) -> Iterator[None]:
    """`make serve` as the README has it, until Ctrl-C."""
    serve = Process(["make", "serve"], log, dict(os.environ), clone)

    def is_ready() -> bool:
        assert serve.exit_status is None, serve.last_lines(50)
        return "Ctrl-C stops it." in log.read_text()

    try:
        wait_until(is_ready, SERVE_SECONDS, "make serve ready")
        print(log.read_text(), flush=True)
        yield
        os.killpg(serve.pid, signal.SIGINT)  # as a terminal does
        # make itself ends by the signal, once what it started has ended.
        assert serve.wait(STOP_SECONDS) in (0, -signal.SIGINT), serve.last_lines(50)
        assert serve.last_lines(1) == "Stopped"
        assert not serve.family()
    finally:
        serve.end()


def left_by_fleets() -> set[Path]:
    return {*Path("/dev/shm").glob("foveal-*"), *Path("/tmp").glob("foveal-up-*")}


if __name__ == "__main__":
    sys.exit(main())
