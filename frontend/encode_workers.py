"""Images that nobody has encoded go to the workers that only encode.

Such a worker runs the vision encoder and leaves what it puts out in its host's cache,
where the workers that generate find it. Where it has none of those on its host, what it
puts out is moved to the host of the worker that the request would go to. So a request
waits, with its images encoded side by side, and is routed when they are; a worker of that
host then costs least. An image is encoded once, however many requests wait for it. Where
no encode worker can help, or none answers in time, the image is encoded where the request
goes, as without them.

vLLM names relied on: EngineCoreRequest, SamplingParams; MultiModalFeatureSpec.mm_position,
PlaceholderRange.offset; EngineCoreOutputs, FinishReason.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest, FinishReason

from frontend.embedding_moves import EmbeddingMoves
from frontend.router.block_hashes import RequestBlocks
from frontend.router.router import Router
from frontend.worker import Worker
from transfer.embeddings.entry import IDENTIFIER

logger = logging.getLogger(__name__)

ENCODE_SECONDS = 20.0
"""A request waits for its images for this long and is then sent as it is."""
PREFIX = "encode-"


@dataclass
class _Job:
    """One image at an encode worker. Keeps the image's tensors in place."""

    request: EngineCoreRequest
    identifier: str
    worker: Worker
    tokens: int
    done: asyncio.Future[bool]
    overdue: bool = False
    """Whether somebody has waited for it in vain."""


_Wait = tuple[_Job | None, asyncio.Future[bool]]
"""An image's job at an encode worker, if it needed one, and what is waited for."""


class EncodeWorkers:
    """The images that encode workers have in hand. Used on one event loop."""

    def __init__(
        self,
        router: Router,
        send: Callable[[EngineCoreRequest, Worker, bool], None],
        moves: EmbeddingMoves,
        count: Callable[[str], None],
        seconds: float = ENCODE_SECONDS,
    ) -> None:
        """``send`` sends a request to a worker, with its tensors if the last argument says
        so; ``count`` is told what became of each image.
        """
        self._router = router
        self._send = send
        self._moves = moves
        self._count = count
        self._seconds = seconds
        self._jobs: dict[str, _Job] = {}
        self._by_image: dict[tuple[str, str], _Job] = {}
        """By shared cache and identifier."""
        self._deliveries: dict[tuple[str, str], _Wait] = {}
        """To other hosts, by shared cache there and identifier; the encoding included."""
        self._coming: dict[str, int] = {}
        """Tokens of the prompts that wait, by the worker they are meant for, if they are
        meant for one: nobody has been charged for them yet."""

    def __len__(self) -> int:
        """Count the images in hand."""
        return len(self._jobs)

    @property
    def waiting_tokens(self) -> int:
        """Tokens of the prompts that wait for images."""
        return sum(self._coming.values())

    async def encode(
        self,
        request: EngineCoreRequest,
        blocks: RequestBlocks,
        encoders: Sequence[Worker],
        generators: Sequence[Worker],
    ) -> None:
        """Have the images of ``request`` that nobody holds encoded; return when they are.

        Of use are the ``encoders`` that share a cache with one of ``generators``; if there
        are none, those whose output can be moved to one.
        """
        unheld = self._router.unheld_images(blocks, [worker.name for worker in generators])
        features = [
            feature
            for feature in request.mm_features or ()
            if feature.identifier in unheld and IDENTIFIER.fullmatch(feature.identifier)
        ]
        if not features or request.prompt_token_ids is None:
            return
        images = self._router.images
        caches = {images.cache_of(worker.name) for worker in generators} - {""}
        # One that hangs must not cost every request its patience.
        hanging = {job.worker.name for job in self._jobs.values() if job.overdue}
        awake = [worker for worker in encoders if worker.name not in hanging]
        if near := [worker for worker in awake if images.cache_of(worker.name) in caches]:
            jobs = [self._job(request, feature, near) for feature in features]
            with self._waiting("", blocks.num_tokens):
                await self._wait([(job, job.done) for job in jobs])
        elif far := self._across_hosts(blocks, awake, generators):
            target, sources = far
            work = [self._bring(request, feature, sources, target) for feature in features]
            with self._waiting(target.name, blocks.num_tokens):
                await self._wait(work)

    def on_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Take over what an encode worker has done."""
        for output in outputs.outputs:
            if output.finished and (job := self._jobs.get(output.request_id)) is not None:
                encoded = output.finish_reason not in (FinishReason.ERROR, FinishReason.ABORT)
                if encoded:
                    cache = self._router.images.cache_of(job.worker.name)
                    self._router.images.note_shared(cache, job.identifier)
                self._end(job, encoded)

    def on_missing(self, request_id: str) -> bool:
        """An encode worker cannot read the tensors: send them along, if it is to have them.

        Tells whether it is.
        """
        if (job := self._jobs.get(request_id)) is None:
            return False
        self._send(job.request, job.worker, True)
        return True

    def on_lost(self, worker: Worker) -> list[EngineCoreRequest]:
        """An encode worker has gone: its images are encoded elsewhere.

        Returns what it had; it may still be reading the tensors.
        """
        self._moves.on_lost(worker)
        lost = [job for job in self._jobs.values() if job.worker is worker]
        for job in lost:
            self._end(job, encoded=False)
        return [job.request for job in lost]

    def close(self) -> None:
        for job in list(self._jobs.values()):
            self._end(job, encoded=False)
        for _, delivery in self._deliveries.values():
            delivery.cancel()

    @contextmanager
    def _waiting(self, worker: str, tokens: int) -> Iterator[None]:
        """Within, a prompt of so many tokens waits, to go to that worker if it is named."""
        self._coming[worker] = self._coming.get(worker, 0) + tokens
        try:
            yield
        finally:
            self._coming[worker] -= tokens
            if not self._coming[worker]:
                del self._coming[worker]

    async def _wait(self, work: Sequence[_Wait]) -> None:
        """Wait for images, but not for ever, and note whose encoding was not done then."""
        # Shielded by wait: who gives up must not end what others wait for.
        await asyncio.wait([done for _, done in work], timeout=self._seconds)
        for job, _ in work:
            if job is not None:
                job.overdue = not job.done.done()

    def _across_hosts(
        self, blocks: RequestBlocks, encoders: Sequence[Worker], generators: Sequence[Worker]
    ) -> tuple[Worker, list[Worker]] | None:
        """The worker that a request had best go to, and whose outputs can be moved there."""
        helped = {
            generator.name: (generator, sources)
            for generator in generators
            if (sources := [w for w in encoders if self._moves.may_help(w, generator)])
        }
        if not helped:
            return None
        costs = self._router.costs(blocks, list(helped))
        return helped[min(costs, key=lambda name: costs[name] + self._coming.get(name, 0))]

    def _bring(
        self,
        request: EngineCoreRequest,
        feature: MultiModalFeatureSpec,
        sources: Sequence[Worker],
        target: Worker,
    ) -> _Wait:
        """Have an image encoded by one of ``sources`` and its output moved to ``target``."""
        images, identifier = self._router.images, feature.identifier
        wanted = (images.cache_of(target.name), identifier)
        known = self._deliveries.get(wanted)
        if known is not None and not _is_overdue(known[0]):
            return known
        job: _Job | None = None
        source = next((w for w in sources if images.is_held(identifier, [w.name])), None)
        if source is None:
            job = self._job(request, feature, sources)
            source = job.worker
        delivery = asyncio.create_task(
            self._deliver(job, identifier, source, target), name="delivery of an output"
        )
        wait = self._deliveries[wanted] = (job, delivery)
        delivery.add_done_callback(lambda _: self._end_delivery(wanted, wait))
        return wait

    def _end_delivery(self, wanted: tuple[str, str], wait: _Wait) -> None:
        if self._deliveries.get(wanted) is wait:  # else another encode worker was asked
            del self._deliveries[wanted]

    async def _deliver(
        self, job: _Job | None, identifier: str, source: Worker, target: Worker
    ) -> bool:
        if job is not None:
            await asyncio.wait([job.done])  # as long as the encode worker lives
            if not job.done.result():
                return False
        return await self._moves.move(identifier, source, target)

    def _job(
        self,
        request: EngineCoreRequest,
        feature: MultiModalFeatureSpec,
        encoders: Sequence[Worker],
    ) -> _Job:
        """The job that has, or now gets, this image."""
        for worker in encoders:
            cache = self._router.images.cache_of(worker.name)
            job = self._by_image.get((cache, feature.identifier))
            if job is not None and not _is_overdue(job):
                return job
        load = dict.fromkeys((worker.name for worker in encoders), 0)
        for job in self._jobs.values():
            if job.worker.name in load:
                load[job.worker.name] += job.tokens
        worker = min(encoders, key=lambda worker: load[worker.name])
        job = _Job(
            request=request_to_encode(request, feature),
            identifier=feature.identifier,
            worker=worker,
            tokens=feature.mm_position.length,
            done=asyncio.get_running_loop().create_future(),
        )
        self._send(job.request, worker, False)
        self._jobs[job.request.request_id] = job
        cache = self._router.images.cache_of(worker.name)
        self._by_image[cache, feature.identifier] = job
        return job

    def _end(self, job: _Job, encoded: bool) -> None:
        del self._jobs[job.request.request_id]
        for key in [key for key, other in self._by_image.items() if other is job]:
            del self._by_image[key]
        if not encoded:
            logger.warning("worker %s did not encode an image", job.worker.name)
        self._count("encoded" if encoded else "failed")
        if not job.done.done():
            job.done.set_result(encoded)


def _is_overdue(job: _Job | None) -> bool:
    """Whether the worker that has an image is not to be waited for."""
    return job is not None and job.overdue


def request_to_encode(
    request: EngineCoreRequest, feature: MultiModalFeatureSpec
) -> EngineCoreRequest:
    """A request for one image of ``request``: its placeholder tokens and nothing else."""
    position = feature.mm_position
    tokens = request.prompt_token_ids or []
    return EngineCoreRequest(
        request_id=f"{PREFIX}{secrets.token_hex(8)}",
        prompt_token_ids=tokens[position.offset : position.offset + position.length],
        mm_features=[replace(feature, mm_position=replace(position, offset=0))],
        sampling_params=SamplingParams(max_tokens=1, temperature=0.0),
        pooling_params=None,
        arrival_time=request.arrival_time,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
