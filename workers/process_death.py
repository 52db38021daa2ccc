"""Engine processes that do not outlive their worker, however it ends.

vLLM's engine runs in processes of its own. A worker that is killed cannot stop them, so
the kernel must: each asks to be killed when its parent dies.

vLLM names relied on: v1.engine.core.EngineCoreProc.run_engine_core, which
CoreEngineProcManager starts by that name.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.engine.core import EngineCoreProc

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

_run_engine_core = EngineCoreProc.run_engine_core


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)


def run_engine_core(*args: Any, **kwargs: Any) -> None:
    """Stands in for vLLM's entry point of the engine process."""
    die_with_parent()
    _run_engine_core(*args, **kwargs)


@contextmanager
def engines_die_with_us() -> Iterator[None]:
    """Within, engine processes are started by way of ``run_engine_core`` above.

    Start them from the main thread: the kernel watches the thread, not the process.
    """
    EngineCoreProc.run_engine_core = staticmethod(run_engine_core)
    try:
        yield
    finally:
        EngineCoreProc.run_engine_core = staticmethod(_run_engine_core)
