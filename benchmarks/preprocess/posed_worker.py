"""A worker without an engine, in a process of its own: ``python -m ... REGISTRY``.

It answers every request with one token at once, so that what is measured is the frontend.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import zmq.asyncio

from benchmarks.path.message_size import PosedWorker
from transfer.registry import Registry


async def pose(directory: Path) -> None:
    worker = PosedWorker(Registry(directory, "default"), zmq.asyncio.Context())
    worker.requests = _Forgetful()
    print("posing", flush=True)
    await worker.run()


class _Forgetful(list[object]):
    """Keeps nothing of what it is given."""

    def append(self, item: object) -> None:
        pass


if __name__ == "__main__":
    asyncio.run(pose(Path(sys.argv[1])))
