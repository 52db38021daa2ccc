"""Child processes that end when they are told to, and when their parent ends.

Each child leads a session of its own, so that Ctrl-C in the terminal reaches only the
parent and whatever a child leaves behind can be ended as a group. The kernel sends a
child SIGTERM when the process that started it is gone, however that happened.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
LAST_BYTES = 32 * 1024


class Child:
    """A running command with its log file."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        *,
        append: bool = False,
    ) -> None:
        """``append`` keeps what the log holds already. Only this user may read the log."""
        self.name = name
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab" if append else "wb", opener=_for_this_user) as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
                preexec_fn=end_with_parent(),
            )
        self.pid = self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def exit_status(self) -> int | None:
        """Its exit status, a negative signal number; None while it runs."""
        return self._process.poll()

    def how_it_ended(self) -> str:
        code = self._process.poll()
        if code is None:
            return "still running"
        if code >= 0:
            return f"exit status {code}"
        return f"killed by {signal.Signals(-code).name}"

    def last_lines(self, count: int) -> list[str]:
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - LAST_BYTES))
            text = file.read().decode(errors="replace")
        return text.splitlines()[-count:]

    def ask_to_end(self) -> None:
        if self.running:
            self._process.terminate()

    def kill_group(self) -> None:
        """Kill the child and what it started, even if it has ended itself."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()


def _for_this_user(path: str, flags: int) -> int:
    """Open a file that may come to hold prompts."""
    fd = os.open(path, flags, 0o600)
    os.fchmod(fd, 0o600)  # it may be there since before
    return fd


def stop_all(
    children: Sequence[Child], patience: float, hurry: Callable[[], bool] = lambda: False
) -> list[Child]:
    """End all children and what they started; return those that had to be killed.

    They get `patience` seconds together, fewer when `hurry` becomes true.
    """
    for child in children:
        child.ask_to_end()
    deadline = time.monotonic() + patience
    while any(child.running for child in children):
        if time.monotonic() > deadline or hurry():
            break
        time.sleep(0.05)
    stubborn = [child for child in children if child.running]
    for child in children:
        child.kill_group()
    return stubborn


def end_with_parent() -> Callable[[], None]:
    """A ``preexec_fn`` that has the kernel end a child with the thread that starts it."""
    # The library is loaded by the parent: little is safe between fork and exec.
    parent, libc = os.getpid(), ctypes.CDLL(None)

    def before_exec() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return before_exec
