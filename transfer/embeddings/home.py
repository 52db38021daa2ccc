"""Where a deployment's encoder outputs are on this host, and how long they stay.

All workers and frontends of one namespace share a directory of shared memory. Each holds
a shared lock on its file ``alive``; the kernel ends that lock with the process. Whoever
leaves last removes the directory, and whoever starts removes those of deployments that
have no living process. So outputs survive the restart of a worker, even of the only one
as long as a frontend lives here or it was killed, and nothing survives the deployment.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import time
from contextlib import suppress
from pathlib import Path

from transfer.arena_layout import SHM
from transfer.errors import ArenaGone

PREFIX = "foveal_embeddings-"
ALIVE = "alive"
JOIN_SECONDS = 2.0
YOUNG_SECONDS = 60.0
"""A directory without ``alive`` may be about to get one for this long."""


class EmbeddingHome:
    """This process's stay in the directory of its deployment.

    ``secret`` is the seed of the deployment's identities: it tells deployments apart.

    Raises:
        ArenaGone: the directory is not private to this user, or cannot be had.
    """

    def __init__(self, secret: bytes, namespace: str, directory: Path = SHM) -> None:
        self.path = home_of(secret, namespace, directory)
        self._fd = _join(self.path)
        self._left = False

    def leave(self) -> bool:
        """Go; tells whether this was the last process, and so removed everything."""
        if self._left:
            return False
        self._left = True
        try:
            return _remove_if_unused(self.path, self._fd)
        finally:
            os.close(self._fd)


def home_of(secret: bytes, namespace: str, directory: Path = SHM) -> Path:
    """Return where this user's deployment of that secret and namespace has its home."""
    named = hashlib.blake2b(f"{os.getuid()} {namespace}".encode(), key=secret, digest_size=12)
    return directory / f"{PREFIX}{named.hexdigest()}"


def sweep_dead_homes(directory: Path = SHM) -> list[str]:
    """Remove what deployments without a living process have left; return the names."""
    removed = []
    for path in sorted(directory.glob(f"{PREFIX}*")):
        try:
            fd = os.open(path / ALIVE, os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > YOUNG_SECONDS:
                    path.rmdir()
            continue
        except OSError:  # another user's
            continue
        try:
            if _remove_if_unused(path, fd):
                removed.append(path.name)
        finally:
            os.close(fd)
    return removed


def _join(path: Path) -> int:
    """Return a descriptor of ``alive`` with a shared lock on it."""
    deadline = time.monotonic() + JOIN_SECONDS
    while True:
        with suppress(BlockingIOError, FileNotFoundError):
            # Not Path.mkdir(exist_ok=True): it fails when the directory goes meanwhile.
            with suppress(FileExistsError):
                os.mkdir(path, 0o700)
            status = path.lstat()
            private = stat.S_ISDIR(status.st_mode) and status.st_mode & 0o777 == 0o700
            if status.st_uid != os.getuid() or not private:
                raise ArenaGone(f"{path} is not a directory of this user's with mode 0700")
            fd = os.open(path / ALIVE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                # Refused while somebody removes it all.
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if os.fstat(fd).st_nlink:
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
        if time.monotonic() > deadline:
            raise ArenaGone(f"{path} is being removed and does not go")
        time.sleep(0.01)


def _remove_if_unused(path: Path, fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    with suppress(FileNotFoundError):
        if os.stat(path / ALIVE).st_ino != os.fstat(fd).st_ino:
            return False
    for model in [each for each in path.iterdir() if each.is_dir()]:
        shutil.rmtree(model, ignore_errors=True)
    # Last: until then, who wants to join waits.
    with suppress(OSError):
        (path / ALIVE).unlink(missing_ok=True)
        path.rmdir()
    return True
