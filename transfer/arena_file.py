"""The file of an arena: made with all its space, locked while its owner lives.

A process that is killed leaves its file behind, and shared memory with it, so whoever
starts next sweeps. An owner is known to be dead by its process id and start time, and
by its lock being free: a process id means nothing in another container, but the lock is
seen from every container that shares the directory.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from contextlib import suppress
from pathlib import Path

from transfer.arena_layout import NAME_PATTERN, NAME_PREFIX, SHM
from transfer.errors import ArenaFull
from transfer.process import is_alive


def create_file(directory: Path, pid: int, start_time: int) -> tuple[Path, int]:
    """Make an empty file that nobody else may open, and lock it.

    The lock lasts as long as the returned descriptor, and ends with the process.
    """
    while True:
        name = f"{NAME_PREFIX}{pid}-{start_time}-{secrets.token_hex(8)}"
        fd = os.open(directory / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return directory / name, fd
        # A sweep from another container came between the two calls.
        os.close(fd)


def take_space(fd: int, size: int, directory: Path) -> None:
    """Give the file ``size`` bytes of memory that nobody can take away any more.

    Raises:
        ArenaFull: the filesystem of ``directory`` has not that much space.
    """
    space = os.statvfs(directory)
    # A filesystem without a limit states zero blocks.
    if space.f_blocks and space.f_bavail * space.f_frsize < size:
        raise _no_space(size, directory)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise _no_space(size, directory) from error


def unlink_own(path: Path, pid: int) -> None:
    """Remove the file if this is the process that made it."""
    # A forked child inherits the arena, and must not remove it when it exits.
    if os.getpid() == pid:
        path.unlink(missing_ok=True)


def sweep_dead_arenas(directory: Path = SHM) -> list[str]:
    """Remove arenas whose owner died without removing them; return their names."""
    removed = []
    for path in sorted(directory.glob(f"{NAME_PREFIX}*")):
        match = NAME_PATTERN.fullmatch(path.name)
        if match is None or is_alive(int(match[1]), int(match[2])):
            continue
        with suppress(OSError):
            if _unlink_unlocked(path):
                removed.append(path.name)
    return removed


def _unlink_unlocked(path: Path) -> bool:
    """Remove a file that nobody holds a lock on; tell whether it was removed."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _no_space(size: int, directory: Path) -> ArenaFull:
    space = os.statvfs(directory)
    free = space.f_bavail * space.f_frsize
    return ArenaFull(
        f"{directory} has {free / 2**30:.2f} GiB free and the arena needs "
        f"{size / 2**30:.2f}: lower --mm-arena-gb (of a worker, --mm-worker-cache-gb), set "
        "it to 0 to send tensors inline, or raise the container's --shm-size"
    )
