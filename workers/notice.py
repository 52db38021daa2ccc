"""Tells other processes that there is something to read, in one wake-up.

A counter in shared memory, and the kernel's futex to sleep on it. ZeroMQ does the same by
way of two threads of its own, one at either end, and takes about four times as long.

A reader remembers the count that it saw last, and sleeps only while that is the count. So
no notice is lost that is given between looking for a message and going to sleep.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import mmap
import os
import platform
import sys
import weakref
from pathlib import Path

_NUMBER_OF_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
"""Of the system call, by machine: Linux, arch/x86/entry/syscalls/syscall_64.tbl and
include/uapi/asm-generic/unistd.h."""
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_ALL = 2**31 - 1
_NAME = slice(64, 64 + hashlib.sha256().digest_size)
"""Where in the page its name is, apart from the counter."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Notice:
    """The counter that ``path`` links to, which whoever gives the notices makes.

    It is memory without a file: nothing is left of it when its processes have ended, however
    they did, and no disk is waited for.
    """

    def __init__(self, path: Path, *, create: bool) -> None:
        """
        Raises:
            OSError: it cannot be made, or is not there, or not one of ours; or this system
                has no futex.
        """
        if sys.platform != "linux" or _NUMBER_OF_FUTEX is None:
            raise OSError(errno.ENOSYS, "no futex is known of this system")
        fd = _make() if create else os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            _require_ours(fd)
            self._map = mmap.mmap(fd, mmap.PAGESIZE)
            name = hashlib.sha256(os.fsencode(path.name)).digest()
            if create:
                self._map[_NAME] = name
                path.symlink_to(f"/proc/{os.getpid()}/fd/{fd}")
            elif self._map[_NAME] != name:
                # In a container that numbers its own processes the link may lead to another
                # notice of ours.
                raise OSError(errno.ESTALE, "another notice than the one of this name")
        except BaseException:
            os.close(fd)
            raise
        if create:  # readers open it by way of this descriptor
            weakref.finalize(self, _withdraw, path, fd, os.getpid())
        else:
            os.close(fd)
        self._count = ctypes.c_uint32.from_buffer(self._map)
        self._seen = self._count.value

    def give(self) -> None:
        """Wake everyone who waits. Not by two at a time: one count may be lost then."""
        self._count.value += 1
        _futex(self._count, _FUTEX_WAKE, _ALL, None)

    def wait(self, seconds: float) -> None:
        """Return when there was a notice since the last call, or some time later.

        It may return early: look for what is awaited, and wait again.

        Raises:
            OSError: the system refuses to wait.
        """
        count = self._count.value
        if count == self._seen:
            whole = int(seconds)
            timeout = _Timespec(whole, int((seconds - whole) * 1e9))
            failed = _futex(self._count, _FUTEX_WAIT, self._seen, timeout)
            if failed not in (0, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
                raise OSError(failed, os.strerror(failed))
        self._seen = self._count.value


def _futex(
    word: ctypes.c_uint32, operation: int, value: int, timeout: _Timespec | None
) -> int:
    """Make the system call; returns its error number, or 0."""
    at = None if timeout is None else ctypes.byref(timeout)
    result = _libc.syscall(
        ctypes.c_long(_NUMBER_OF_FUTEX or 0), ctypes.byref(word), ctypes.c_int(operation),
        ctypes.c_uint32(value), at, None, ctypes.c_uint32(0),
    )
    return ctypes.get_errno() if result == -1 else 0


def _make() -> int:
    """Return the descriptor of a page of memory that can be mapped for good."""
    fd = os.memfd_create("foveal-notice", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, mmap.PAGESIZE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _require_ours(fd: int) -> None:
    """Make sure that nobody can cut off the memory, which would kill who reads it.

    Raises:
        OSError: somebody could.
    """
    status = os.fstat(fd)
    sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS  # of files it raises
    if not sealed or status.st_uid != os.geteuid() or status.st_size != mmap.PAGESIZE:
        raise OSError(errno.EPERM, "not a notice of ours")


def _withdraw(path: Path, fd: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has the object, too
        path.unlink(missing_ok=True)
        os.close(fd)
