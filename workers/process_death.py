"""Engine processes that do not outlive their worker, however it ends.

vLLM's engine runs in processes of its own. A worker that is killed cannot stop them, so
the kernel must: each asks to be killed when its parent dies.

vLLM names relied on: v1.engine.core.EngineCoreProc.run_engine_core, which
CoreEngineProcManager starts by that name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.engine.core import EngineCoreProc

from transfer.parent_death import die_with_parent
from workers.engine_polling import nap_instead_of_polling

_run_engine_core = EngineCoreProc.run_engine_core


def run_engine_core(*args: Any, **kwargs: Any) -> None:
    """Stands in for vLLM's entry point of the engine process."""
    die_with_parent()
    nap_instead_of_polling()
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
