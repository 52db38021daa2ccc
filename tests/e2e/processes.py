"""Starting programs, watching them and ending them with all their children."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

POLL_SECONDS = 0.05


class Process:
    """A program in a session of its own, with its output in a file."""

    def __init__(
        self, command: Sequence[str], log: Path, env: Mapping[str, str], directory: Path
    ) -> None:
        self.log = log
        with log.open("wb") as output:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=directory,
                start_new_session=True,
            )
        self.pid = self._popen.pid

    @property
    def exit_status(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._popen.poll()

    def signal(self, number: int) -> None:
        """Signal the program itself, not its children."""
        self._popen.send_signal(number)

    def wait(self, seconds: float) -> int:
        """Wait for its end and return its exit status.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        return self._popen.wait(seconds)

    def family(self) -> list[int]:
        """All living processes of its session, the program itself included."""
        return [pid for pid, session in _sessions() if session == self.pid]

    def end(self, seconds: float = 30.0) -> None:
        """Have it stop; what is left of its session after that is killed."""
        if self.exit_status is None:
            self.signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.wait(seconds)
        for pid in self.family():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait(10.0)

    def last_lines(self, count: int) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])


def _sessions() -> list[tuple[int, int]]:
    """Process id and session of every living process; zombies are not living."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            stat = (entry / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, _, _, session = stat[stat.rindex(")") + 2 :].split()[:4]
        if state not in "ZX":
            found.append((int(entry.name), int(session)))
    return found


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait for something that nobody announces.

    Raises:
        TimeoutError: it has not come true; the text names ``what``.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        time.sleep(POLL_SECONDS)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def accepts(path: Path) -> bool:
    """Whether somebody listens on a Unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0
