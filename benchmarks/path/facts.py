"""What a worker of the demo checkpoint would state, without starting an engine."""

from __future__ import annotations

from pathlib import Path

from benchmarks.processes import CHECKPOINT, ENGINE_FLAGS
from transfer.messages import WorkerFacts
from workers.engine_args import engine_config, facts_of, parse


def demo_facts(sockets: Path, seed_fingerprint: str) -> WorkerFacts:
    """Facts that a frontend of the demo checkpoint agrees with."""
    _, args = parse(["--model", str(CHECKPOINT), *ENGINE_FLAGS])
    return facts_of(engine_config(args, sockets), seed_fingerprint)
