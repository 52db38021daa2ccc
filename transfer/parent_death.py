"""A process that does not outlive the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
from multiprocessing.process import parent_process

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends.

    Where that has ended already, and ``multiprocessing`` knows of it, it is killed at once:
    a process that is spawned imports for seconds before it can ask.
    """
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    starter = parent_process()
    if os.getppid() != parent or (starter is not None and not starter.is_alive()):
        os.kill(os.getpid(), signal.SIGKILL)  # it died before the kernel was asked
