"""Which workers have lately encoded which images, as far as this frontend knows.

An engine keeps the encoder's output of recent images apart from its KV cache, as many
tokens of them as its encoder cache holds, and evicts what it has not used for longest. It
does not publish this, so it is followed from what was routed: an estimate that only steers,
and that forgets as the engine does. An image that lies wholly in cached blocks is not
encoded and therefore not refreshed there, and not here.

Besides, workers of one host may share the encoder's outputs (``transfer.embeddings``). What
is in there they do say: any of them loads such an output instead of encoding the image.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from transfer.messages import LoadReport

# Until an engine has said how much it keeps.
ASSUMED_CAPACITY_TOKENS = 8192

# Loading an output is a copy or two: far less than encoding, but more than having it.
LOADING_SHARE = 32


class PromptImage(NamedTuple):
    """One multimodal item of a prompt."""

    identifier: str
    """What the engine's encoder cache knows it by."""
    offset: int
    """Its first placeholder token in the prompt."""
    length: int
    """Its placeholder tokens."""


class EncoderWork(NamedTuple):
    """Placeholder tokens of a prompt's images, by what a worker must do about them."""

    missing: int
    """To be encoded for this request; of outputs to be loaded a small share."""
    queued: int
    """About to be encoded there for an earlier request."""


NO_WORK = EncoderWork(0, 0)


class ImagesHeld(NamedTuple):
    """Of the images that a worker has not in its KV cache, whose encoder output is held."""

    needed: int = 0
    """Images whose encoder output is needed."""
    held: int = 0
    """Those of them that need not be encoded, as far as is known."""
    shared: frozenset[str] = frozenset()
    """What the worker's host shares: for these the worker needs no pixels."""


NO_IMAGES = ImagesHeld()


class _Encoded:
    """What one worker is believed to hold, the most recent last."""

    __slots__ = ("images", "tokens")

    def __init__(self) -> None:
        self.images: OrderedDict[str, int] = OrderedDict()
        self.tokens = 0

    def put(self, image: PromptImage, capacity: int) -> list[str]:
        """Returns the images that are forgotten for it."""
        if image.identifier in self.images:
            self.images.move_to_end(image.identifier)
        else:
            self.images[image.identifier] = image.length
            self.tokens += image.length
        forgotten = []
        while self.tokens > capacity:
            identifier, length = self.images.popitem(last=False)
            self.tokens -= length
            forgotten.append(identifier)
        return forgotten


class ImageAffinity:
    """An estimate of each worker's encoder cache."""

    def __init__(self, capacity_tokens: int = ASSUMED_CAPACITY_TOKENS) -> None:
        """``capacity_tokens``: placeholder tokens that one engine's encoder cache holds."""
        self.capacity_tokens = capacity_tokens
        self._encoded: dict[str, _Encoded] = {}
        self._holders: dict[str, set[str]] = {}
        """The other way round: who is believed to hold an image."""
        self._cache_of: dict[str, str] = {}
        """The shared cache of each worker that has one."""
        self._shared: dict[str, frozenset[str]] = {}
        self._counts: dict[str, tuple[int, int]] = {}
        """By worker, images encoded and outputs loaded, as it says."""

    def __len__(self) -> int:
        """Count the images remembered, added up over workers."""
        return sum(len(encoded.images) for encoded in self._encoded.values())

    def work(
        self, worker: str, images: Sequence[PromptImage], held_tokens: int, known_tokens: int
    ) -> EncoderWork:
        """Return what ``worker`` would have to encode.

        It holds the prompt's first ``held_tokens`` and, with what it is about to compute,
        the first ``known_tokens``.
        """
        if not images:
            return NO_WORK
        encoded = self._encoded.get(worker)
        shared = self._shared_with(worker)
        if encoded is None and not known_tokens and not shared:
            return EncoderWork(sum(image.length for image in images), 0)
        known = encoded.images if encoded is not None else ()
        missing = queued = 0
        for identifier, offset, length in images:
            if offset + length <= held_tokens:
                continue
            if offset + length <= known_tokens:
                queued += length
            elif identifier not in known:
                missing += length // LOADING_SHARE if identifier in shared else length
            elif offset < known_tokens and known_tokens > held_tokens:
                queued += length
        return EncoderWork(missing, queued)

    def works(
        self,
        workers: Sequence[str],
        images: Sequence[PromptImage],
        held: Sequence[int],
        promised: Sequence[int],
        block_size: int,
    ) -> tuple[list[int], list[int]]:
        """Do so for several workers; return what is missing and what is queued for each.

        Each holds as many leading blocks of ``block_size`` tokens as ``held`` says, and is
        about to compute as many more as ``promised`` says.
        """
        missing, queued = [0] * len(workers), [0] * len(workers)
        if not images:
            return missing, queued
        ends = [image.offset + image.length for image in images]
        # Tokens of an image and all behind it.
        left = [*accumulate([image.length for image in reversed(images)], initial=0)]
        left.reverse()
        in_order = all(a <= b for a, b in pairwise(ends))
        concerned = self._concerned({image.identifier for image in images})
        for number, worker in enumerate(workers):
            held_tokens = held[number] * block_size
            known_tokens = held_tokens + promised[number] * block_size
            if not in_order or worker in concerned:
                missing[number], queued[number] = self.work(
                    worker, images, held_tokens, known_tokens
                )
                continue
            first = left[bisect_right(ends, known_tokens)] if known_tokens else left[0]
            missing[number] = first
            if known_tokens != held_tokens:
                queued[number] = left[bisect_right(ends, held_tokens)] - first
        return missing, queued

    def _concerned(self, identifiers: set[str]) -> set[str]:
        """Return the workers that need not encode all of these images."""
        concerned: set[str] = set()
        for identifier in identifiers:
            concerned.update(self._holders.get(identifier, ()))
        caches = {
            cache for cache, held in self._shared.items() if not identifiers.isdisjoint(held)
        }
        if caches:
            concerned.update(w for w, cache in self._cache_of.items() if cache in caches)
        return concerned

    def add(self, worker: str, images: Sequence[PromptImage], held_tokens: int) -> None:
        """Note that ``worker`` will use the encoder's output of these images.

        It holds the prompt's first ``held_tokens``, and encodes no image within them.
        """
        outside = [image for image in images if image.offset + image.length > held_tokens]
        if not outside:
            return
        encoded = self._encoded.get(worker)
        if encoded is None:
            encoded = self._encoded[worker] = _Encoded()
        for image in outside:
            self._holders.setdefault(image.identifier, set()).add(worker)
            for identifier in encoded.put(image, self.capacity_tokens):
                self._forget(worker, identifier)

    def held(
        self, worker: str, images: Sequence[PromptImage], held_tokens: int
    ) -> ImagesHeld:
        """Return what is held of the images beyond the prompt's first ``held_tokens``.

        To be asked before ``add``.
        """
        if not images:
            return NO_IMAGES
        outside = {i.identifier for i in images if i.offset + i.length > held_tokens}
        shared = outside & self._shared_with(worker)
        encoded = self._encoded.get(worker)
        known = outside.intersection(encoded.images) if encoded is not None else set()
        return ImagesHeld(len(outside), len(known | shared), frozenset(shared))

    def on_report(self, worker: str, report: LoadReport) -> None:
        """Take over what ``worker`` says of the outputs that its host shares."""
        cache = report.embedding_cache
        if self._cache_of.get(worker, "") != cache:
            self._leave_cache(worker)
            if cache:
                self._cache_of[worker] = cache
        if cache and report.embeddings is not None:
            self._shared[cache] = frozenset(report.embeddings)
        self._counts[worker] = (report.encoder_runs, report.embedding_loads)

    def cache_of(self, worker: str) -> str:
        """Return what names the shared cache of a worker; empty if it has none."""
        return self._cache_of.get(worker, "")

    def note_shared(self, cache: str, identifier: str) -> None:
        """Note an output that has just been put into a cache that some worker shares."""
        if cache in self._cache_of.values():
            self._shared[cache] = self._shared.get(cache, frozenset()) | {identifier}

    def is_held(self, identifier: str, workers: Iterable[str]) -> bool:
        """Tell whether any of these workers need not encode an image, wherever it stands."""
        for worker in workers:
            encoded = self._encoded.get(worker)
            if encoded is not None and identifier in encoded.images:
                return True
            if identifier in self._shared_with(worker):
                return True
        return False

    def describe(self, worker: str) -> dict[str, int]:
        """What ``GET /v1/fleet`` shows of it."""
        runs, loads = self._counts.get(worker, (0, 0))
        return {
            "encoder_runs": runs,
            "embedding_loads": loads,
            "shared_embeddings": len(self._shared_with(worker)),
        }

    def drop_worker(self, worker: str, *, gone: bool = False) -> None:
        """Forget what ``worker`` held: it is ``gone``, or was told to forget."""
        encoded = self._encoded.pop(worker, None)
        for identifier in encoded.images if encoded is not None else ():
            self._forget(worker, identifier)
        if gone:
            self._leave_cache(worker)
            self._counts.pop(worker, None)

    def _forget(self, worker: str, identifier: str) -> None:
        holders = self._holders[identifier]
        holders.remove(worker)
        if not holders:
            del self._holders[identifier]

    def _shared_with(self, worker: str) -> frozenset[str]:
        return self._shared.get(self._cache_of.get(worker, ""), frozenset())

    def _leave_cache(self, worker: str) -> None:
        cache = self._cache_of.pop(worker, None)
        if cache is not None and cache not in self._cache_of.values():
            self._shared.pop(cache, None)
