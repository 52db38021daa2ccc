"""Hears of the end of another process on this host, without asking again and again."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from transfer.process import is_alive, is_hidden


class ProcessWatch:
    """Calls back once when a process ends. Close it when it is no longer wanted."""

    def __init__(self, pidfd: int, ended: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._pidfd: int | None = pidfd
        self._ended = ended
        self._loop.add_reader(pidfd, self._on_end)

    def close(self) -> None:
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    def _on_end(self) -> None:
        self.close()
        self._ended()


def watch_process(
    pid: int, start_time: int, ended: Callable[[], None]
) -> ProcessWatch | None:
    """Watch the process that has ``pid`` since ``start_time``; see ``transfer.process``.

    Where it is already gone ``ended`` is called soon. Returns None where the kernel does
    not let this process watch that one; heartbeats must do then.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        asyncio.get_running_loop().call_soon(ended)
        return None
    except OSError:
        return None
    # The number may belong to another process now.
    if not is_alive(pid, start_time) and not is_hidden(pid):
        os.close(pidfd)
        asyncio.get_running_loop().call_soon(ended)
        return None
    return ProcessWatch(pidfd, ended)
