"""A mock engine: vLLM's scheduling without a model, in simulated time.

One step computes a batch: first the requests that run, then waiting ones as long as there
are tokens in the step's budget, blocks, and room for images (chunked prefill). Blocks are
found by digest before anything is computed (prefix caching), and are cached when they are
scheduled, so a request behind in the same batch finds them. When blocks run out, the
request that came last is preempted and computed anew. How long a step takes says
``cost_model``.

Nothing here waits, reads a clock or does input and output. ``begin`` starts a step and
says when it will be over; whoever drives the engine calls ``finish`` at that time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from workers.mock.block_pool import BlockEvent, BlockPool
from workers.mock.cost_model import decode_seconds, step_seconds
from workers.mock.encoder_cache import EncoderCache

# Times are sums of floats; a step that ends at ``now`` has ended.
_ROUNDING_SECONDS = 1e-9


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine was started with, named as vLLM's flags are."""

    num_blocks: int
    block_size: int
    """Tokens per block."""
    max_num_seqs: int
    max_num_batched_tokens: int
    encoder_cache_tokens: int
    """Embedding tokens kept, and also those encoded in one step at most."""


@dataclass(frozen=True, slots=True)
class EncoderItem:
    """An image in a prompt: its placeholders are ``tokens`` tokens from ``offset`` on."""

    identity: str
    offset: int
    tokens: int


@dataclass(eq=False, slots=True)
class MockRequest:
    """A request, and how far it has got."""

    request_id: str
    prompt_tokens: int
    answer_tokens: int
    """How many tokens it will be answered with, at least one."""
    digests: Sequence[bytes]
    """Block hashes of the prompt and the answer behind it: what a mock answers is known."""
    items: tuple[EncoderItem, ...] = ()
    reads_cache: bool = True
    """False for requests that vLLM computes whole, such as those for prompt logprobs."""

    computed: int = 0
    """Tokens whose keys and values are in its blocks."""
    generated: int = 0
    cached_tokens: int | None = None
    """Prompt tokens found in the cache when it was first scheduled."""
    blocks: list[int] = field(default_factory=list)
    num_cached_blocks: int = 0
    """How many leading ones of its blocks others can find."""

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + self.generated

    @property
    def items_end(self) -> int:
        """Where the last image ends; from there on no encoder output is needed."""
        return self.items[-1].offset + self.items[-1].tokens if self.items else 0


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """What one request got from a step, or from several that were taken together."""

    request: MockRequest
    new_tokens: int
    first: bool
    """Whether these are the first tokens of the answer."""
    finished: bool


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What a step gave."""

    tokens: list[TokenOutput]
    events: list[BlockEvent]


@dataclass(slots=True)
class _Batch:
    """The step under way; ``steps`` above 1 only where nothing but decoding is done."""

    began: float
    tokens_left: int
    chunks: list[tuple[MockRequest, int]] = field(default_factory=list)
    prefill_tokens: int = 0
    encoder_tokens: int = 0
    decode_requests: int = 0
    context_tokens: int = 0
    steps: int = 1

    def end(self, steps: int) -> float:
        if self.prefill_tokens or self.encoder_tokens:
            return self.began + step_seconds(
                self.prefill_tokens,
                self.encoder_tokens,
                self.decode_requests,
                self.context_tokens,
            )
        return self.began + decode_seconds(steps, self.decode_requests, self.context_tokens)

    def steps_until(self, now: float) -> int:
        """Return how many steps it takes until one ends at ``now`` or later."""
        numbers = range(1, self.steps)
        return 1 + bisect_left(numbers, now - _ROUNDING_SECONDS, key=self.end)


class MockEngine:
    """One engine. Use it from one place: ``begin``, then ``finish``, and again."""

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks)
        self.encoder_cache = EncoderCache(limits.encoder_cache_tokens)
        self.waiting: deque[MockRequest] = deque()
        self.running: dict[str, MockRequest] = {}
        self.preemptions = 0
        self._batch: _Batch | None = None

    @property
    def idle(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.waiting and not self.running

    @property
    def in_step(self) -> bool:
        """Whether a step has begun and not been finished."""
        return self._batch is not None

    def add(self, request: MockRequest) -> None:
        """Queue a request.

        Raises:
            ValueError: it can never be computed here; the text says why.
        """
        tokens = request.prompt_tokens + request.answer_tokens
        room = self.limits.num_blocks * self.limits.block_size
        if request.prompt_tokens < 1 or request.answer_tokens < 1:
            raise ValueError("a request needs a prompt and an answer")
        if tokens > room:
            raise ValueError(f"{tokens} tokens do not fit into the {room} of the KV cache")
        for item in request.items:
            if item.tokens > self.limits.encoder_cache_tokens:
                raise ValueError(
                    f"an image of {item.tokens} tokens does not fit into the encoder cache "
                    f"of {self.limits.encoder_cache_tokens}"
                )
        self.waiting.append(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests; those that are not there are ignored."""
        for request_id in request_ids:
            request = self.running.pop(request_id, None)
            if request is not None:
                self._let_go(request)
                continue
            for request in self.waiting:
                if request.request_id == request_id:
                    self.waiting.remove(request)
                    self._let_go(request)
                    break

    def begin(self, now: float, max_steps: int = 1) -> float | None:
        """Schedule a step that begins at ``now``, in seconds; return when it will be over.

        None when there is nothing to compute. Up to ``max_steps`` steps are taken
        together as long as they only decode and nothing is waiting: then the end is that
        of the last, and ``boundary`` says where they can be cut short.

        Raises:
            RuntimeError: the step before has not been finished.
        """
        if self._batch is not None:
            raise RuntimeError("a step is under way")
        batch = _Batch(now, self.limits.max_num_batched_tokens)
        preempted = self._schedule_running(batch)
        if not preempted:
            self._schedule_waiting(batch)
        if not batch.chunks:
            return None
        if max_steps > 1 and not (
            batch.prefill_tokens or batch.encoder_tokens or self.waiting
        ):
            batch.steps = self._steps_ahead(batch, max_steps)
        self._batch = batch
        return batch.end(batch.steps)

    def boundary(self, now: float) -> float:
        """Return when the step that is under way at ``now`` is over.

        Raises:
            RuntimeError: no step is under way.
        """
        batch = self._under_way()
        return batch.end(batch.steps_until(now))

    def finish(self, now: float) -> StepOutputs:
        """End what ``begin`` began and return what it gave, as of a ``boundary``.

        Raises:
            RuntimeError: no step is under way.
        """
        batch = self._under_way()
        self._batch = None
        steps = batch.steps_until(now)
        outputs = []
        for request, chunk in batch.chunks:
            if self.running.get(request.request_id) is not request:
                continue  # aborted meanwhile
            output = self._advance(request, chunk, steps)
            if output is not None:
                outputs.append(output)
        return StepOutputs(outputs, self.pool.take_events())

    def _under_way(self) -> _Batch:
        if self._batch is None:
            raise RuntimeError("no step is under way")
        return self._batch

    # Scheduling.

    def _schedule_running(self, batch: _Batch) -> bool:
        """Take in the requests that run; True when one had to be preempted."""
        preempted = False
        for request in list(self.running.values()):
            if batch.tokens_left == 0:
                break
            if request.request_id not in self.running:
                break  # preempted for the sake of one before it
            missing = request.num_tokens - request.computed
            chunk, encode = self._fit(request, missing, batch)
            if chunk == 0:
                continue
            while (count := self._blocks_needed(request, chunk)) > self.pool.num_unused:
                preempted = True
                if self._preempt_last() is request:
                    return True
            self._commit(request, chunk, encode, count, batch)
        return preempted

    def _schedule_waiting(self, batch: _Batch) -> None:
        while (
            self.waiting
            and len(self.running) < self.limits.max_num_seqs
            and batch.tokens_left > 0
        ):
            request = self.waiting[0]
            found = self._find(request)
            request.computed = len(found) * self.limits.block_size
            missing = request.num_tokens - request.computed
            chunk, encode = self._fit(request, missing, batch)
            count = self._blocks_needed(request, chunk) - len(found)
            if chunk == 0 or count > self.pool.num_unused - self.pool.count_unused(found):
                request.computed = 0
                return
            self.waiting.popleft()
            self.pool.use(found)
            request.blocks = found
            request.num_cached_blocks = len(found)
            if request.cached_tokens is None:
                request.cached_tokens = request.computed
            self.running[request.request_id] = request
            self._commit(request, chunk, encode, count, batch)

    def _find(self, request: MockRequest) -> list[int]:
        """Blocks that it need not compute: never all, for the last token gives the next."""
        if not request.reads_cache:
            return []
        reusable = (request.num_tokens - 1) // self.limits.block_size
        return self.pool.find(request.digests[:reusable])

    def _fit(
        self, request: MockRequest, missing: int, batch: _Batch
    ) -> tuple[int, list[EncoderItem]]:
        """Return how many tokens it may compute now, and the images to encode for that."""
        chunk = min(missing, batch.tokens_left)
        if request.computed >= request.items_end:
            return chunk, []
        ahead: dict[str, EncoderItem] = {}
        for item in request.items:
            if item.offset >= request.computed + chunk:
                break
            if item.offset + item.tokens > request.computed:
                ahead.setdefault(item.identity, item)
        # Those that are there first, or making room for the others could cost them.
        encode = []
        for item in ahead.values():
            if item.identity in self.encoder_cache:
                self.encoder_cache.use(item.identity, item.tokens, request.request_id)
            else:
                encode.append(item)
        claimed = 0
        for position, item in enumerate(encode):
            claimed += item.tokens
            budget = self.limits.encoder_cache_tokens - batch.encoder_tokens
            if claimed > budget or not self.encoder_cache.has_room(claimed):
                return max(0, item.offset - request.computed), encode[:position]
        return chunk, encode

    def _blocks_needed(self, request: MockRequest, chunk: int) -> int:
        size = self.limits.block_size
        return -(-(request.computed + chunk) // size) - len(request.blocks)

    def _commit(
        self,
        request: MockRequest,
        chunk: int,
        encode: Sequence[EncoderItem],
        num_new_blocks: int,
        batch: _Batch,
    ) -> None:
        for item in encode:
            self.encoder_cache.use(item.identity, item.tokens, request.request_id)
            batch.encoder_tokens += item.tokens
        if num_new_blocks > 0:
            request.blocks += self.pool.allocate(num_new_blocks)
        self._cache_full_blocks(request, request.computed + chunk)
        batch.chunks.append((request, chunk))
        batch.tokens_left -= chunk
        if request.generated and request.computed + 1 == request.num_tokens:
            batch.decode_requests += 1
            batch.context_tokens += request.num_tokens
        else:
            batch.prefill_tokens += chunk

    def _cache_full_blocks(self, request: MockRequest, num_tokens: int) -> None:
        full = min(num_tokens // self.limits.block_size, len(request.digests))
        if full > request.num_cached_blocks:
            new = slice(request.num_cached_blocks, full)
            self.pool.cache(request.blocks[new], request.digests[new])
            request.num_cached_blocks = full

    def _preempt_last(self) -> MockRequest:
        """Take the blocks of the request that came last; it is computed anew later."""
        _, request = self.running.popitem()
        self._let_go(request)
        request.computed = request.num_cached_blocks = 0
        request.blocks = []
        self.waiting.appendleft(request)
        self.preemptions += 1
        return request

    def _steps_ahead(self, batch: _Batch, max_steps: int) -> int:
        """How many equal steps can follow each other until somebody is done."""
        if len(batch.chunks) < len(self.running):
            return 1
        requests = [request for request, _ in batch.chunks]
        steps = min(max_steps, *(r.answer_tokens - r.generated for r in requests))
        if sum(self._blocks_needed(r, steps) for r in requests) > self.pool.num_unused:
            return 1
        return steps

    # What a step leads to.

    def _advance(self, request: MockRequest, chunk: int, steps: int) -> TokenOutput | None:
        if steps > 1:
            count = self._blocks_needed(request, steps)
            if count > 0:
                request.blocks += self.pool.allocate(count)
            self._cache_full_blocks(request, request.computed + steps)
        before = request.computed
        request.computed += chunk if steps == 1 else steps
        if before < request.items_end:
            for item in request.items:
                if item.offset + item.tokens <= request.computed:
                    self.encoder_cache.release(item.identity, request.request_id)
        if request.computed < request.num_tokens:
            return None
        first = request.generated == 0
        request.generated += steps
        finished = request.generated >= request.answer_tokens
        if finished:
            del self.running[request.request_id]
            self._let_go(request)
        return TokenOutput(request, steps, first, finished)

    def _let_go(self, request: MockRequest) -> None:
        self.pool.release(request.blocks)
        for item in request.items:
            self.encoder_cache.release(item.identity, request.request_id)
