"""Block hashes of stretches of prompts that were hashed before.

A chat of many turns sends all of them again, and a picture has its thousand tokens each
time. A block's hash follows from the hash before it, its token ids and its extra keys, so
those of several blocks in a row follow from the hash before the first, all token ids, and
what makes extra keys: the items in them, the adapter, and the salt.

vLLM names relied on: v1.request.Request (all_token_ids, lora_request, mm_features,
cache_salt); what v1.core.kv_cache_utils.generate_block_hash_extra_keys makes keys of.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from itertools import pairwise

from vllm.v1.request import Request

CHUNK_BLOCKS = 8
MOST_CHUNKS = 8192
"""With blocks of 32 tokens 2 million tokens, in some 15 MB."""


class HashedChunks:
    """Keeps the hashes of the chunks used last. For one thread."""

    def __init__(self, block_size: int, most: int = MOST_CHUNKS) -> None:
        """``block_size`` is in tokens."""
        self._size = block_size * CHUNK_BLOCKS
        self._most = most
        self._known: OrderedDict[Hashable, Sequence[bytes]] = OrderedDict()

    def known_of(self, request: Request, root: bytes) -> list[bytes]:
        """The hashes of a prompt's first blocks, as far as all chunks up to there are known.

        ``root`` is what the first block's hash follows from.
        """
        hashes: list[bytes] = []
        if not _in_order(request):
            return hashes
        for start in range(0, request.num_tokens - self._size + 1, self._size):
            key = self._key(request, start, hashes[-1] if hashes else root)
            chunk = self._known.get(key)
            if chunk is None:
                break
            self._known.move_to_end(key)
            hashes += chunk
        return hashes

    def keep(self, request: Request, root: bytes, hashes: Sequence[bytes], known: int) -> None:
        """Remember a prompt's ``hashes``, of which the first ``known`` were known."""
        if not _in_order(request):
            return
        for begin in range(known, len(hashes) - CHUNK_BLOCKS + 1, CHUNK_BLOCKS):
            start = begin // CHUNK_BLOCKS * self._size
            key = self._key(request, start, hashes[begin - 1] if begin else root)
            self._known[key] = tuple(hashes[begin : begin + CHUNK_BLOCKS])
        while len(self._known) > self._most:
            self._known.popitem(last=False)

    def _key(self, request: Request, start: int, parent: bytes) -> Hashable:
        end = start + self._size
        adapter = request.lora_request.lora_name if request.lora_request else None
        tokens = array("I", request.all_token_ids[start:end]).tobytes()
        return parent, tokens, tuple(_items(request, start, end)), adapter, request.cache_salt


def _items(request: Request, start: int, end: int) -> Iterator[tuple[str, int, int]]:
    """The items with tokens from ``start`` to ``end``, with their places from there."""
    for feature in request.mm_features:
        place = feature.mm_position
        # vLLM looks at an item up to the token behind it.
        if place.offset < end and place.offset + place.length >= start:
            yield feature.identifier, place.offset - start, place.length


def _in_order(request: Request) -> bool:
    """Whether items follow each other: else the keys of a block depend on others, too."""
    places = [feature.mm_position for feature in request.mm_features]
    return all(
        before.offset + before.length <= after.offset for before, after in pairwise(places)
    )
