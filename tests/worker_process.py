"""A fake worker in a process of its own: one that can be killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from tests.fakes import FakeWorker
from transfer.process import process_start_time
from transfer.registry import Registry

ROOT = Path(__file__).parents[1]


class WorkerProcess:
    """Starts the process; ``stdin`` is its life."""

    def __init__(self, registry: Registry, name: str, *, cache_gib: float) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [
                sys.executable, "-m", "tests.worker_process", str(registry.path.parent),
                registry.path.name, name, str(cache_gib),
            ],
            stdin=subprocess.PIPE,
            cwd=ROOT,
        )
        self.pid = self._process.pid

    @property
    def is_alive(self) -> bool:
        return process_start_time(self.pid) is not None and self._process.poll() is None

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()


async def _serve(root: str, namespace: str, name: str, cache_gib: str) -> None:
    worker = FakeWorker(
        Registry(Path(root), namespace), name, cache_gib=float(cache_gib),
        transfer_timeout=60.0,
    )
    async with worker:
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_serve(*sys.argv[1:]))
