"""Chooses the worker of each request.

The main path of this folder: what each worker holds of the prompt (``kv_index``, kept by
``kv_plane``), what it was just promised (``promises``), which of its images it has lately
encoded (``image_affinity``) and what it has in flight (``worker_load``) give a cost
(``cost``); the cheapest worker is charged at once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from frontend.router.block_hashes import RequestBlocks
from frontend.router.cost import Candidate, RouterSettings, choose, costs_of
from frontend.router.image_affinity import NO_IMAGES, ImageAffinity, ImagesHeld
from frontend.router.kv_index import KvIndex
from frontend.router.kv_plane import KvPlane
from frontend.router.promises import Promises
from frontend.router.worker_load import LoadBook
from transfer.messages import LoadReport

MODES = ("kv", "round-robin", "random", "least-loaded")

# Only turns blocks into tokens and back, for prompts routed before any was hashed.
_ASSUMED_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes, and why."""

    worker: str
    overlap_blocks: int
    """Leading blocks the engine will take from its cache, as its events confirm."""
    promised_blocks: int
    """Blocks behind those that the worker is about to hold; they only steer."""
    prompt_blocks: int
    """Full blocks of the prompt; 0 when it was not hashed."""
    cost: float
    """In tokens of prefill, see ``cost``."""
    alternatives: tuple[Candidate, ...]
    """The other workers, cheapest first."""
    images: ImagesHeld = NO_IMAGES
    """What need not be encoded of the images beyond the cached blocks."""


class Router:
    """Holds what is known of the workers and routes one request at a time.

    Not safe to call from several threads. ``route`` decides and charges in one call, so
    a caller on an event loop sees each decision include all earlier ones.
    """

    def __init__(
        self,
        mode: str,
        settings: RouterSettings,
        clock: Callable[[], float],
        rng: random.Random,
        frontend: str = "",
    ) -> None:
        """``clock`` returns seconds and never goes back.

        ``frontend`` is the name under which workers report this frontend's own requests.

        Raises:
            ValueError: the mode is unknown.
        """
        if mode not in MODES:
            raise ValueError(f"router mode {mode} is none of {', '.join(MODES)}")
        self.mode = mode
        self.settings = settings
        self.index = KvIndex()
        self.plane = KvPlane(self.index)
        self.load = LoadBook()
        self.promises = Promises(settings.promise_seconds, clock)
        self.images = ImageAffinity()
        self.frontend = frontend
        self._encoder_resets: dict[str, int] = {}
        self._rng = rng
        self._rotation = 0
        self._block_size = _ASSUMED_BLOCK_SIZE
        # The load alone decides when caches earn no credit.
        self._load_only = replace(settings, overlap_score_credit=0.0)

    def route(
        self,
        request_id: str,
        blocks: RequestBlocks | None,
        num_tokens: int,
        candidates: Sequence[str],
        pinned: str | None = None,
    ) -> Route:
        """Choose a worker for a prompt of ``num_tokens`` and charge it.

        A request routed before is charged anew. ``pinned`` is taken whenever it is one
        of the candidates. Without ``blocks`` the route knows of no overlap.

        Raises:
            ValueError: there are no candidates.
        """
        if blocks is not None:
            self._block_size = blocks.block_size
        self.load.finish(request_id)
        weighed = self._weigh(blocks, num_tokens, candidates)
        chosen = self._choose(weighed, pinned)
        images = NO_IMAGES
        if blocks is not None:
            held_tokens = chosen.overlap_blocks * self._block_size
            images = self.images.held(chosen.worker, blocks.images, held_tokens)
        self._charge(request_id, chosen, blocks, num_tokens)
        others = [candidate for candidate in weighed if candidate is not chosen]
        others.sort(key=itemgetter(Candidate._fields.index("cost")))
        return Route(
            worker=chosen.worker,
            overlap_blocks=chosen.overlap_blocks,
            promised_blocks=chosen.promised_blocks,
            prompt_blocks=len(blocks.digests) if blocks is not None else 0,
            cost=chosen.cost,
            alternatives=tuple(others),
            images=images,
        )

    def unheld_images(self, blocks: RequestBlocks, candidates: Sequence[str]) -> set[str]:
        """Return the images that all of the candidates would have to encode."""
        reusable = blocks.digests[: blocks.reusable]
        overlaps = self.index.overlap(reusable)
        promises = self.promises.all_leading(reusable, overlaps)
        known = max((overlaps.get(w, 0) + promises.get(w, 0) for w in candidates), default=0)
        return {
            image.identifier
            for image in blocks.images
            if image.offset + image.length > known * blocks.block_size
            and not self.images.is_held(image.identifier, candidates)
        }

    def costs(self, blocks: RequestBlocks, candidates: Sequence[str]) -> dict[str, float]:
        """Return what a prompt would cost on each of these workers; charges nobody."""
        self._block_size = blocks.block_size
        weighed = self._weigh(blocks, blocks.num_tokens, candidates)
        return {candidate.worker: candidate.cost for candidate in weighed}

    def first_token(self, request_id: str) -> None:
        """Note that the prompt of a request has been computed."""
        self.load.first_token(request_id)

    def finish(self, request_id: str) -> None:
        """Note that a request has ended, however it did."""
        self.load.finish(request_id)

    def on_report(self, worker: str, report: LoadReport) -> bool:
        """Take over what a worker reports; True when a snapshot of it must be asked for."""
        self.load.report(worker, report, self.frontend)
        if self._encoder_resets.get(worker, 0) != report.encoder_resets:
            self._encoder_resets[worker] = report.encoder_resets
            self.images.drop_worker(worker)
        self.images.on_report(worker, report)
        return self.plane.on_position(worker, report.epoch, report.seq)

    def drop_worker(self, worker: str) -> list[str]:
        """Forget a lost worker; return the ids of the requests it had in flight."""
        self.plane.on_lost(worker)
        self.promises.drop_worker(worker)
        self.images.drop_worker(worker, gone=True)
        self._encoder_resets.pop(worker, None)
        return self.load.drop_worker(worker)

    def _weigh(
        self, blocks: RequestBlocks | None, num_tokens: int, candidates: Sequence[str]
    ) -> list[Candidate]:
        load_only = self.mode == "least-loaded"
        settings = self._load_only if load_only else self.settings
        block_size = self._block_size
        reusable = blocks.digests[: blocks.reusable] if blocks is not None else []
        images = blocks.images if blocks is not None else ()
        dropped = blocks is not None and blocks.last_match_dropped
        overlaps = self.index.overlap(reusable)
        promises = self.promises.all_leading(reusable, overlaps)
        held = [overlaps.get(worker, 0) for worker in candidates]
        promised = [promises.get(worker, 0) for worker in candidates]
        if dropped:
            known = [max(0, a + b - 1) for a, b in zip(held, promised, strict=True)]
            held = [max(0, overlap - 1) for overlap in held]
            promised = [a - b for a, b in zip(known, held, strict=True)]
        missing, queued = self.images.works(candidates, images, held, promised, block_size)
        loads = self.load.loads(candidates)
        mean_requests = (sum([load.requests for load in loads]) + 1) / max(1, len(loads))
        nothing = [0] * len(candidates)
        encoder = (nothing, nothing) if load_only else (missing, queued)
        works = zip(held, promised, *encoder, strict=True)
        costs = costs_of(num_tokens, works, loads, block_size, settings, mean_requests)
        return list(map(Candidate, candidates, costs, held, promised, missing))

    def _choose(self, weighed: Sequence[Candidate], pinned: str | None) -> Candidate:
        if not weighed:
            raise ValueError("there is no worker to choose from")
        for candidate in weighed:
            if candidate.worker == pinned:
                return candidate
        if self.mode == "random":
            return self._rng.choice(weighed)
        if self.mode == "round-robin":
            self._rotation += 1
            return weighed[(self._rotation - 1) % len(weighed)]
        choice = choose(weighed, self.settings.temperature, self._rng, self._rotation)
        # Decisions without a tie do not turn the wheel: else a pattern of alternating
        # requests could stop it always at the same worker.
        self._rotation += choice.tied > 0
        return choice.candidate

    def _charge(
        self,
        request_id: str,
        chosen: Candidate,
        blocks: RequestBlocks | None,
        num_tokens: int,
    ) -> None:
        known = (chosen.overlap_blocks + chosen.promised_blocks) * self._block_size
        encoder = chosen.image_tokens * self.settings.encoder_load_scale
        self.load.charge(
            chosen.worker,
            request_id,
            prefill_tokens=max(0, num_tokens - known) + round(encoder),
            blocks=-(-num_tokens // self._block_size),
        )
        if blocks is not None:
            held_tokens = chosen.overlap_blocks * self._block_size
            self.images.add(chosen.worker, blocks.images, held_tokens)
            if self.mode == "kv":
                self.promises.add(chosen.worker, blocks.digests)
