"""Keeps several frontend processes running behind one port.

Each is a frontend of its own, with its own arena and index; the kernel spreads connections
over them (SO_REUSEPORT). The one that starts them serves nothing itself: it starts again
what has crashed, more and more slowly while that goes on, and ends all when it is told to.
If it is killed, the kernel tells the others to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Sequence

from transfer.arena_file import sweep_dead_arenas
from transfer.process import told_when_parent_ends

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0
"""Between a crash and the next start; doubled each time, ..."""

STEADY_SECONDS = 60.0
"""... until a process has run for this long."""

STOP_SECONDS = 10.0
"""How long a process may take to end when it has drained; then it is killed."""

BAD_SETTING = 2
"""Exit status that starting again would not change."""


async def supervise(command: Sequence[str], count: int, drain_seconds: float) -> int:
    """Keep ``count`` processes of ``command`` running until SIGTERM or Ctrl-C.

    Each may take ``drain_seconds`` to finish what it has when it is told to end.

    Returns the exit status: 0, or that of a process that cannot work with its settings.
    None of the processes is left, and nothing of their shared memory.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    keepers = [loop.create_task(_keep(command, stopping, drain_seconds)) for _ in range(count)]
    try:
        await asyncio.wait(keepers, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.set()
        statuses = await asyncio.gather(*keepers)
        for name in sweep_dead_arenas():
            logger.warning("removed %s, left by a process that was killed", name)
    return max(statuses)


async def _keep(
    command: Sequence[str], stopping: asyncio.Event, drain_seconds: float
) -> int:
    """Run one process, again and again; returns when stopping or when it is of no use."""
    pause = FIRST_PAUSE_SECONDS
    while not stopping.is_set():
        began = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *command,
            # In a group of its own, so that Ctrl-C in a terminal reaches only the parent.
            process_group=0,
            preexec_fn=told_when_parent_ends(signal.SIGTERM),
        )
        if not await _ends_before(process, stopping):
            await _end(process, drain_seconds + STOP_SECONDS)
            return 0
        if process.returncode == BAD_SETTING:
            return BAD_SETTING
        if time.monotonic() - began >= STEADY_SECONDS:
            pause = FIRST_PAUSE_SECONDS
        logger.error(
            "frontend process %d ended with status %s; the next starts in %.0f s",
            process.pid, process.returncode, pause,
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await stopping.wait()
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
    return 0


async def _ends_before(process: asyncio.subprocess.Process, event: asyncio.Event) -> bool:
    """Wait for either; True when the process has ended."""
    waits = {asyncio.ensure_future(process.wait()), asyncio.ensure_future(event.wait())}
    _, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in pending:
        wait.cancel()
    return not event.is_set()


async def _end(process: asyncio.subprocess.Process, seconds: float) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(seconds):
            await process.wait()
    except TimeoutError:
        logger.error("frontend process %d does not end: killing it", process.pid)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
