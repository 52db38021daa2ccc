"""Replays a trace against mock engines, event by event, in simulated time.

Nothing sleeps and nothing is sent: a clock jumps from one event to the next. Requests,
tokens and KV events take a fixed time between frontend and workers.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.replay.policies import ORACLE, Oracle, Policy, RouterPolicy
from benchmarks.replay.prepare import Prepared
from frontend.router.cost import RouterSettings
from transfer.messages import KvDelta
from workers.kv_state import KvState
from workers.mock.engine import EngineLimits, MockEngine, TokenOutput
from workers.mock.kv_events import encode_events

HOP_SECONDS = 0.0005
"""From frontend to worker, and for tokens back."""
KV_EVENT_SECONDS = 0.003
"""From the end of an engine's step until a frontend has its KV events in the index."""

LIMITS = EngineLimits(
    num_blocks=1536,
    block_size=16,
    max_num_seqs=128,
    max_num_batched_tokens=2048,
    encoder_cache_tokens=8192,
)
"""A small KV cache of 24,576 tokens, so that a short trace fills it."""

MANY_STEPS = 1_000_000


@dataclass(slots=True)
class Outcome:
    """What became of one request; times are in seconds of the replay."""

    arrived: float
    worker: str
    prompt_tokens: int
    cached_tokens: int = 0
    first_token: float = 0.0
    finished: float = 0.0

    @property
    def ttft(self) -> float:
        """Seconds from arrival to first token."""
        return self.first_token - self.arrived


@dataclass(frozen=True, slots=True)
class Replay:
    """What a replay gave."""

    outcomes: dict[str, Outcome]
    """By request id, in the order of arrival."""
    busy_seconds: dict[str, float]
    """How long each worker computed."""
    preemptions: int


class _Worker:
    """An engine, and what a worker process knows of its KV cache."""

    def __init__(self, name: str, limits: EngineLimits) -> None:
        self.name = name
        self.engine = MockEngine(limits)
        self.epoch = f"epoch of {name}"
        self.kv_state = KvState(limits.block_size, self.epoch)
        self.plan = 0
        """Number of the planned end of a step; earlier plans have been given up."""
        self.began = 0.0
        self.busy_seconds = 0.0


class Simulation:
    """One replay of one trace with one policy."""

    def __init__(
        self,
        trace: Sequence[Prepared],
        policy: str,
        workers: int,
        *,
        seed: int = 0,
        limits: EngineLimits = LIMITS,
        settings: RouterSettings | None = None,
    ) -> None:
        """``policy`` is a router mode or ``oracle``; ``settings`` are the router's."""
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._trace = trace
        self._followers: dict[str, list[Prepared]] = defaultdict(list)
        self._outcomes: dict[str, Outcome] = {}
        names = [f"mock-worker-{number}" for number in range(1, workers + 1)]
        self._workers = {name: _Worker(name, limits) for name in names}
        self._policy = self._make_policy(policy, seed, settings)

    def run(self) -> Replay:
        """Replay the whole trace.

        Raises:
            RuntimeError: some requests have not been answered.
        """
        for request in self._trace:
            if request.request.after is not None:
                self._followers[request.request.after].append(request)
            else:
                self._at(request.request.at or 0.0, self._arrive, request)
        while self._events:
            self.now, _, action, arguments = heapq.heappop(self._events)
            action(*arguments)
        answered = sum(outcome.finished > 0 for outcome in self._outcomes.values())
        if answered != len(self._trace):
            raise RuntimeError(f"{len(self._trace) - answered} requests were not answered")
        workers = self._workers.values()
        return Replay(
            self._outcomes,
            {worker.name: worker.busy_seconds for worker in workers},
            sum(worker.engine.preemptions for worker in workers),
        )

    def _make_policy(
        self, policy: str, seed: int, settings: RouterSettings | None
    ) -> Policy:
        if policy == ORACLE:
            return Oracle({name: worker.engine for name, worker in self._workers.items()})
        epochs = {name: worker.epoch for name, worker in self._workers.items()}
        return RouterPolicy(policy, epochs, lambda: self.now, seed, settings)

    def _at(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (time, next(self._order), action, arguments))

    # At the frontend.

    def _arrive(self, request: Prepared) -> None:
        worker = self._policy.route(request)
        self._outcomes[request.request.id] = Outcome(
            self.now, worker, request.prompt.num_tokens
        )
        self._at(self.now + HOP_SECONDS, self._add, self._workers[worker], request)

    def _hear(self, tokens: Iterable[TokenOutput]) -> None:
        for token in tokens:
            request_id = token.request.request_id
            outcome = self._outcomes[request_id]
            if token.first:
                outcome.first_token = self.now
                outcome.cached_tokens = token.request.cached_tokens or 0
                self._policy.first_token(request_id)
            if token.finished:
                outcome.finished = self.now
                self._policy.finish(request_id)
                for follower in self._followers.pop(request_id, ()):
                    self._at(self.now + follower.request.delay, self._arrive, follower)

    def _hear_delta(self, worker: str, delta: KvDelta) -> None:
        self._policy.on_delta(worker, delta)

    # At a worker.

    def _add(self, worker: _Worker, request: Prepared) -> None:
        worker.engine.add(request.for_engine())
        if worker.engine.in_step:
            # What was to be done until somebody finishes ends with the step under way.
            self._plan(worker, worker.engine.boundary(self.now))
        else:
            self._begin(worker)

    def _begin(self, worker: _Worker) -> None:
        ends = worker.engine.begin(self.now, MANY_STEPS)
        if ends is not None:
            worker.began = self.now
            self._plan(worker, ends)

    def _plan(self, worker: _Worker, ends: float) -> None:
        worker.plan += 1
        self._at(ends, self._finish, worker, worker.plan)

    def _finish(self, worker: _Worker, plan: int) -> None:
        if plan != worker.plan:
            return
        worker.busy_seconds += self.now - worker.began
        step = worker.engine.finish(self.now)
        if step.tokens:
            self._at(self.now + HOP_SECONDS, self._hear, step.tokens)
        if step.events:
            size = worker.engine.limits.block_size
            delta = worker.kv_state.apply(encode_events(step.events, size))
            if delta is not None:
                self._at(self.now + KV_EVENT_SECONDS, self._hear_delta, worker.name, delta)
        self._begin(worker)
