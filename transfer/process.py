"""Which processes live, and which of them share this host."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_DEAD_STATES = frozenset("ZXx")
_BUSY_STATES = frozenset("RD")


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """A process of any host, told apart from all others."""

    pid: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    start_time: int
    """Clock ticks after boot, from /proc/<pid>/stat: tells a reused pid apart."""
    host: str
    """See ``same_host_key``."""

    def is_local(self) -> bool:
        """Whether it can be looked at from here."""
        return self.host == same_host_key()

    def is_dead(self) -> bool:
        """Whether it is known to be gone; False where that cannot be told."""
        return (
            self.is_local()
            and not is_alive(self.pid, self.start_time)
            and not is_hidden(self.pid)
        )


def this_process() -> Process:
    """Return the process that asks."""
    pid = os.getpid()
    return Process(pid=pid, start_time=process_start_time(pid) or 0, host=same_host_key())


def process_start_time(pid: int) -> int | None:
    """Return when ``pid`` started, in clock ticks since boot; None when it is not alive.

    None, too, if /proc hides it (``is_hidden``).

    A process id is used again; together with its start time it names one process. A
    zombie counts as dead: it has no memory left.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The command name, in parentheses, may itself hold spaces and parentheses.
    fields = stat[stat.rindex(b")") + 1 :].split()
    if fields[0].decode() in _DEAD_STATES:
        return None
    return int(fields[19])


def is_alive(pid: int, start_time: int) -> bool:
    """Tell whether the process that started then under this id still runs."""
    return process_start_time(pid) == start_time


def is_hidden(pid: int) -> bool:
    """Tell whether there is a process of another user here that /proc says nothing of.

    So it is where /proc is mounted with ``hidepid``.
    """
    if process_start_time(pid) is not None:
        return False
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except ProcessLookupError:
        pass
    return False


def wants_to_run(pid: int) -> bool:
    """Tell whether any thread of a process runs, would run, or waits for a disk.

    One that does not, and does not answer either, has been stopped or is stuck. False for
    a process that has ended, or that cannot be looked at.
    """
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return False
    for task in tasks:
        try:
            stat = (task / "stat").read_bytes()
        except OSError:  # the thread has ended
            continue
        if stat[stat.rindex(b")") + 2 :][:1].decode() in _BUSY_STATES:
            return True
    return False


def same_host_key() -> str:
    """Return a text that two processes share if they see each other's process ids.

    It names the running kernel and the process id namespace (one per container).
    """
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id}-{os.stat('/proc/self/ns/pid').st_ino}"


def place_of(path: Path) -> str:
    """Return a text that two processes share if they see the same file or directory.

    It names the running kernel, the file system and the file: containers may share these.
    """
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    status = path.stat()
    return f"{boot_id}-{status.st_dev:x}-{status.st_ino:x}"


def told_when_parent_ends(number: int) -> Callable[[], None]:
    """Return what a child runs before it becomes another program (``preexec_fn``).

    From then on the kernel sends it signal ``number`` when this thread ends.
    """
    parent = os.getpid()
    # Loaded by the parent: little is safe between fork and exec.
    libc = ctypes.CDLL(None)

    def before_exec() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # it ended before the kernel was asked
            os._exit(1)

    return before_exec
