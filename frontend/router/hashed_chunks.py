"""Block hashes of stretches of prompts that were hashed before.

A chat of many turns sends all of them again, and a picture has its thousand tokens each
time. A block's hash follows from the hash before it, its token ids and its extra keys, so
those of several blocks in a row follow from the hash before the first, all token ids, and
what makes extra keys: the items in them, the adapter, and the salt.

vLLM names relied on: v1.request.Request (all_token_ids, mm_features, cache_salt); what
v1.core.kv_cache_utils.generate_block_hash_extra_keys makes keys of, for adapters
_gen_lora_extra_hash_keys.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Sequence

from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

CHUNK_BLOCKS = 8
MOST_TOKENS = 1 << 21
"""Of all chunks: 8 MB, and as much again for hashes of blocks of 32 tokens."""
MOST_CHUNKS = 1 << 14
"""With smaller blocks there are fewer tokens."""


class HashedChunks:
    """Keeps the hashes of the chunks used last. For one thread."""

    def __init__(self, block_size: int, most_tokens: int = MOST_TOKENS) -> None:
        """``block_size`` is in tokens."""
        self._size = block_size * CHUNK_BLOCKS
        self._most = min(max(1, most_tokens // self._size), MOST_CHUNKS)
        self._known: OrderedDict[Hashable, Sequence[bytes]] = OrderedDict()

    def known_of(self, request: Request, root: bytes) -> list[bytes]:
        """The hashes of a prompt's first blocks, as far as all chunks up to there are known.

        ``root`` is what the first block's hash follows from.
        """
        hashes: list[bytes] = []
        prompt = _Prompt(request)
        if not prompt.in_order:
            return hashes
        for start in range(0, request.num_tokens - self._size + 1, self._size):
            key = prompt.key(start, start + self._size, hashes[-1] if hashes else root)
            chunk = self._known.get(key)
            if chunk is None:
                break
            self._known.move_to_end(key)
            hashes += chunk
        return hashes

    def keep(self, request: Request, root: bytes, hashes: Sequence[bytes], known: int) -> None:
        """Remember a prompt's ``hashes``, of which the first ``known`` were known."""
        if len(hashes) - known < CHUNK_BLOCKS:
            return  # no chunk among them, as when only a question is new
        prompt = _Prompt(request)
        if not prompt.in_order:
            return
        for begin in range(known, len(hashes) - CHUNK_BLOCKS + 1, CHUNK_BLOCKS):
            start = begin // CHUNK_BLOCKS * self._size
            parent = hashes[begin - 1] if begin else root
            key = prompt.key(start, start + self._size, parent)
            self._known[key] = tuple(hashes[begin : begin + CHUNK_BLOCKS])
        while len(self._known) > self._most:
            self._known.popitem(last=False)


class _Prompt:
    """What makes the hashes of a request's blocks."""

    def __init__(self, request: Request) -> None:
        self._token_ids = request.all_token_ids
        self._salt = request.cache_salt
        self._adapter = tuple(kv_cache_utils._gen_lora_extra_hash_keys(request))
        places = [feature.mm_position for feature in request.mm_features]
        self._items = [feature.identifier for feature in request.mm_features]
        self._starts = [place.offset for place in places]
        self._lengths = [place.length for place in places]
        self._ends = [place.offset + place.length for place in places]

    @property
    def in_order(self) -> bool:
        """Whether items follow each other: else the keys of a block depend on others, too."""
        behind = zip(self._ends, self._starts[1:], strict=False)
        return all(end <= start for end, start in behind)

    def key(self, start: int, end: int, parent: bytes) -> Hashable:
        """Of the tokens from ``start`` to ``end``, behind a block with the hash ``parent``."""
        token_ids = array("I", self._token_ids[start:end]).tobytes()
        # vLLM looks at an item up to the token behind it.
        first, last = bisect_left(self._ends, start), bisect_left(self._starts, end)
        items = tuple(
            (self._items[n], self._starts[n] - start, self._lengths[n])
            for n in range(first, last)
        )
        return parent, token_ids, items, self._adapter, self._salt
