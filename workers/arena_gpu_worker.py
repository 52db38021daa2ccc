"""vLLM's GPU worker, reading tensors from arenas. Not exercised by the tests: no GPU.

vLLM names relied on: v1.worker.gpu_worker.Worker.
"""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from transfer.arena_view import ArenaView
from transfer.tensor_ref import ArenaId
from workers.arena_worker import ArenaReader
from workers.pinned_memory import pin, unpin


class ArenaGPUWorker(ArenaReader, Worker):
    """Pins what it maps, so that copies to the device need not be waited for."""

    def _open_arena(self, arena: ArenaId) -> ArenaView:
        view = ArenaView(arena, shared=True)
        pin(view.memory())
        return view

    def _close_arena(self, view: ArenaView) -> None:
        unpin(view.memory())
        view.close()
