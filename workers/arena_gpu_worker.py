"""vLLM's GPU worker, reading tensors from arenas. Not exercised by the tests: no GPU.

vLLM names relied on: v1.worker.gpu_worker.Worker.
"""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from workers.arena_worker import ArenaReader


class ArenaGPUWorker(ArenaReader, Worker):
    pass
