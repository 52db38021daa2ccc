"""Who chooses the worker in a replay: the frontend's router in each mode, or an oracle."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from benchmarks.replay.prepare import Prepared
from frontend.router.cost import RouterSettings
from frontend.router.router import MODES, Router
from transfer.messages import KvDelta, KvSnapshot
from workers.mock.cost_model import (
    ENCODER_TOKEN_SECONDS,
    PREFILL_TOKEN_SECONDS,
    STEP_SECONDS,
)
from workers.mock.engine import MockEngine, MockRequest

ORACLE = "oracle"
POLICIES = (*MODES, ORACLE)

TIE_SECONDS = 0.02
"""First tokens that come as soon as each other, as far as anybody could notice."""


class Policy(Protocol):
    """Chooses workers, and hears what a frontend hears."""

    def route(self, request: Prepared) -> str: ...
    def first_token(self, request_id: str) -> None: ...
    def finish(self, request_id: str) -> None: ...
    def on_delta(self, worker: str, delta: KvDelta) -> None: ...


class RouterPolicy:
    """The shipped router, told what a frontend would tell it."""

    def __init__(
        self,
        mode: str,
        epochs: Mapping[str, str],
        clock: Callable[[], float],
        seed: int,
        settings: RouterSettings | None = None,
    ) -> None:
        """``epochs`` holds the epoch of each worker's KV events, by its name."""
        self.router = Router(mode, settings or RouterSettings(), clock, random.Random(seed))
        self._workers = list(epochs)
        for worker, epoch in epochs.items():
            self.router.plane.on_ready(worker, epoch)
            self.router.plane.on_snapshot(worker, KvSnapshot(epoch, 0, {}))

    def route(self, request: Prepared) -> str:
        prompt = request.prompt
        return self.router.route(
            request.request.id, prompt, prompt.num_tokens, self._workers
        ).worker

    def first_token(self, request_id: str) -> None:
        self.router.first_token(request_id)

    def finish(self, request_id: str) -> None:
        self.router.finish(request_id)

    def on_delta(self, worker: str, delta: KvDelta) -> None:
        """
        Raises:
            RuntimeError: the router wants a snapshot, although nothing is lost here.
        """
        if self.router.plane.on_delta(worker, delta):
            raise RuntimeError(f"delta {delta.seq} of {worker} is not the next one")


class Oracle:
    """Knows every engine as it is at this moment, and takes the soonest first token.

    For each worker it adds up what the queue there and this request cost to compute, by
    the engines' own cost model. It sees caches without delay, and the prompts that queue
    in front of a request and will be cached when its turn comes.
    """

    def __init__(self, engines: Mapping[str, MockEngine]) -> None:
        self._engines = engines
        self._sent: dict[str, tuple[str, MockRequest, int]] = {}
        """Worker, request and tokens still to compute of those without a first token."""
        self._coming: dict[str, Counter[bytes]] = {name: Counter() for name in engines}
        self._queued: dict[str, dict[str, int]] = {name: {} for name in engines}
        self._given = dict.fromkeys(engines, 0)
        """Tokens that each worker was given to compute, in all."""

    def route(self, request: Prepared) -> str:
        digests = request.prompt.digests[: request.prompt.reusable]
        seconds = {
            worker: self._seconds(worker, request, self._known(worker, digests))
            for worker in self._engines
        }
        soonest = min(seconds.values()) + TIE_SECONDS
        worker = min(
            (name for name in seconds if seconds[name] <= soonest),
            key=lambda name: self._given[name],
        )
        known = self._known(worker, digests) * request.prompt.block_size
        self._sent[request.request.id] = worker, request.for_engine(), known
        self._queued[worker][request.request.id] = request.prompt.num_tokens - known
        self._given[worker] += request.prompt.num_tokens - known
        self._coming[worker].update(request.prompt.digests)
        return worker

    def first_token(self, request_id: str) -> None:
        worker, request, _ = self._sent.pop(request_id)
        del self._queued[worker][request_id]
        full = request.prompt_tokens // self._engines[worker].limits.block_size
        coming = self._coming[worker]
        for digest in request.digests[:full]:
            coming[digest] -= 1
            if not coming[digest]:
                del coming[digest]

    def finish(self, request_id: str) -> None:
        pass

    def on_delta(self, worker: str, delta: KvDelta) -> None:
        pass

    def _known(self, worker: str, digests: Sequence[bytes]) -> int:
        """Leading blocks that will be there when a request's turn comes."""
        known = self._engines[worker].pool.leading(digests)
        coming = self._coming[worker]
        while known < len(digests) and digests[known] in coming:
            known += 1
        return known

    def _seconds(self, worker: str, request: Prepared, known: int) -> float:
        engine = self._engines[worker]
        computed = known * request.prompt.block_size
        to_encode = sum(
            item.tokens
            for item in request.items
            if item.offset + item.tokens > computed
            and item.identity not in engine.encoder_cache
        )
        tokens = request.prompt.num_tokens - computed + sum(self._queued[worker].values())
        steps = 1 + tokens // engine.limits.max_num_batched_tokens
        return (
            tokens * PREFILL_TOKEN_SECONDS
            + to_encode * ENCODER_TOKEN_SECONDS
            + (steps + bool(engine.running) / 2) * STEP_SECONDS
        )
