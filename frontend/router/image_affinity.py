"""Which workers have lately encoded which images, as far as this frontend knows.

An engine keeps the encoder's output of recent images apart from its KV cache, as many
tokens of them as its encoder cache holds, and evicts what it has not used for longest. It
does not publish this, so it is followed from what was routed: an estimate that only steers,
and that forgets as the engine does. An image that lies wholly in cached blocks is not
encoded and therefore not refreshed there, and not here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

# Until an engine has said how much it keeps.
ASSUMED_CAPACITY_TOKENS = 8192


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
    """To be encoded for this request."""
    queued: int
    """About to be encoded there for an earlier request."""


NO_WORK = EncoderWork(0, 0)


class _Encoded:
    """What one worker is believed to hold, the most recent last."""

    __slots__ = ("images", "tokens")

    def __init__(self) -> None:
        self.images: OrderedDict[str, int] = OrderedDict()
        self.tokens = 0

    def put(self, image: PromptImage, capacity: int) -> None:
        if image.identifier in self.images:
            self.images.move_to_end(image.identifier)
        else:
            self.images[image.identifier] = image.length
            self.tokens += image.length
        while self.tokens > capacity:
            self.tokens -= self.images.popitem(last=False)[1]


class ImageAffinity:
    """An estimate of each worker's encoder cache."""

    def __init__(self, capacity_tokens: int = ASSUMED_CAPACITY_TOKENS) -> None:
        """``capacity_tokens``: placeholder tokens that one engine's encoder cache holds."""
        self.capacity_tokens = capacity_tokens
        self._encoded: dict[str, _Encoded] = {}

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
        if encoded is None and not known_tokens:
            return EncoderWork(sum(image.length for image in images), 0)
        known = encoded.images if encoded is not None else ()
        missing = queued = 0
        for identifier, offset, length in images:
            if offset + length <= held_tokens:
                continue
            if offset + length <= known_tokens:
                queued += length
            elif identifier not in known:
                missing += length
            elif offset < known_tokens and known_tokens > held_tokens:
                queued += length
        return EncoderWork(missing, queued)

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
            encoded.put(image, self.capacity_tokens)

    def drop_worker(self, worker: str) -> None:
        """Forget what ``worker`` held: it is gone, or was told to forget."""
        self._encoded.pop(worker, None)
