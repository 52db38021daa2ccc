"""vLLM's CPU worker, reading tensors from arenas.

vLLM names relied on: v1.worker.cpu_worker.CPUWorker.
"""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from workers.arena_worker import ArenaReader


class ArenaCPUWorker(ArenaReader, CPUWorker):
    pass
