"""vLLM's block hasher for its CBOR algorithms, which serializes a prompt's tokens in one go.

vLLM hashes, for each block, the CBOR of (hash of the block before, token ids, extra keys),
with a call of the CBOR library for each. What that library makes of a tuple is a head and
then what it makes of each member, so here it is called once for all token ids of a prompt,
and what it returns is cut where the blocks end. The bytes that are hashed are the same.

Because routing stands on equal hashes, ``block_hasher`` compares the two on prompts made
for that, once, and gives vLLM's own where they differ. Extra keys come from vLLM's function,
which is called only for the blocks that can have keys of their own, and not where all of a
block and the token behind it belong to one image: its key is then the only one.

vLLM names relied on: utils.hashing.get_hash_fn_by_name;
v1.core.kv_cache_utils.get_request_block_hasher, generate_block_hash_extra_keys, NONE_HASH;
v1.request.Request (all_token_ids, block_hashes, lora_request, mm_features, prompt_embeds).
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Any, Protocol

import cbor2
import numpy as np
import xxhash
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from frontend.router.hashed_chunks import HashedChunks

logger = logging.getLogger(__name__)

BlockHasher = Callable[[Request], list[Any]]
"""Returns the hashes, as bytes, of the full blocks that a request has no hashes of yet."""


class Digest(Protocol):
    """A hash of some bytes."""

    def digest(self) -> bytes: ...


DIGESTS: dict[str, Callable[[bytes], Digest]] = {
    "sha256_cbor": hashlib.sha256,
    "xxhash_cbor": xxhash.xxh3_128,
}
"""What vLLM's CBOR algorithms do with the serialized block."""


def block_hasher(block_size: int, algorithm: str) -> BlockHasher:
    """Return the fastest hasher that gives vLLM's hashes; vLLM's root must be set.

    ``block_size`` is in tokens.

    Raises:
        ValueError: vLLM does not know the algorithm.
    """
    theirs = kv_cache_utils.get_request_block_hasher(
        block_size, get_hash_fn_by_name(algorithm)
    )
    if algorithm not in DIGESTS:
        return theirs
    ours = CborBlockHasher(block_size, DIGESTS[algorithm], theirs)
    for request in _samples(block_size):
        expected = theirs(request)
        if ours(request) != expected or ours(request) != expected:  # computed, and kept
            logger.warning("blocks are hashed by vLLM's own function: it has changed")
            return theirs
    return ours


class CborBlockHasher:
    """Hashes the blocks of a prompt; leaves what it does not know to vLLM's hasher."""

    def __init__(
        self, block_size: int, digest: Callable[[bytes], Digest], vllm_hasher: BlockHasher
    ) -> None:
        """``block_size`` is in tokens."""
        self._block_size = block_size
        self._digest = digest
        self._vllm_hasher = vllm_hasher
        self._chunks = HashedChunks(block_size)
        root = kv_cache_utils.NONE_HASH
        # The heads of a block, of its first member and of its second. Zeros and None are
        # one byte each.
        self._before_parent = _dumps((0, 0, 0))[:-3] + _dumps(bytes(root))[: -len(root)]
        self._before_tokens = _dumps((0,) * block_size)[:-block_size]

    def __call__(self, request: Request) -> list[Any]:
        """Return what vLLM's hasher would."""
        if request.block_hashes or request.prompt_embeds is not None:
            return self._vllm_hasher(request)
        size = self._block_size
        num_blocks = request.num_tokens // size
        if not num_blocks:
            return []
        root = kv_cache_utils.NONE_HASH
        try:
            hashes = self._chunks.known_of(request, root)
            known = len(hashes)
            if known == num_blocks:
                return hashes
            tokens = request.all_token_ids[known * size : num_blocks * size]
            ends = _ends_of_blocks(tokens, size)
        except (OverflowError, TypeError):  # no token ids, as far as is known here
            return self._vllm_hasher(request)
        # Behind the head of the list.
        serialized = _dumps(tokens)[-ends[-1] :]
        extras = self._extra_keys(request, known, num_blocks)
        digest, before_parent = self._digest, self._before_parent
        before_tokens = self._before_tokens
        parent: bytes = hashes[-1] if hashes else root
        for (start, end), extra in zip(pairwise(ends), extras, strict=True):
            members = (before_parent, parent, before_tokens, serialized[start:end], extra)
            parent = digest(b"".join(members)).digest()
            hashes.append(parent)
        self._chunks.keep(request, root, hashes, known)
        return hashes

    def _extra_keys(self, request: Request, first: int, num_blocks: int) -> list[bytes]:
        """Serialize the extra keys of each block from ``first`` on.

        Blocks in no image have the same ones, but for the first, which has the salt.
        """
        size = self._block_size
        own = {0}
        for feature in request.mm_features:
            start, length = feature.mm_position.offset, feature.mm_position.length
            own.update(range(start // size, min(-(-(start + length) // size), num_blocks)))
        beyond = max(
            (f.mm_position.offset + f.mm_position.length for f in request.mm_features),
            default=size,
        )
        keys, _ = kv_cache_utils.generate_block_hash_extra_keys(
            request, beyond + size, beyond + 2 * size, 0
        )
        extras = [_dumps(keys)] * num_blocks
        images: dict[tuple[str, str], bytes] = {}
        item = 0
        begin, end, head = 0, 0, b""  # of the image that vLLM's function would look at next
        for block in sorted(own - set(range(first))):
            start = block * size
            if begin <= start and start + size < end:
                extras[block] = head + _integer(begin - start)
                continue
            keys, item = kv_cache_utils.generate_block_hash_extra_keys(
                request, start, start + size, item
            )
            extras[block] = _serialized(keys, images)
            begin, end, head = _alone_in_blocks(request, item, images)
        return extras[first:]


def _dumps(value: Any) -> bytes:
    return cbor2.dumps(value, canonical=True)


_integer = lru_cache(maxsize=1 << 14, typed=True)(_dumps)


def _ends_of_blocks(tokens: list[int], block_size: int) -> list[int]:
    """Return where blocks end in the serialized members of ``tokens``, from 0 on.

    Raises:
        OverflowError, TypeError: something is not an integer from 0 to 2**32 - 1.
    """
    values = np.frombuffer(array("I", tokens), dtype=np.uint32)
    nbytes = np.ones(len(values), dtype=np.int64)
    for largest, more in ((23, 1), (0xFF, 1), (0xFFFF, 2)):
        nbytes += (values > largest) * more
    of_blocks = nbytes.reshape(-1, block_size).sum(axis=1)
    ends: list[int] = of_blocks.cumsum().tolist()
    return [0, *ends]


def _serialized(keys: tuple[Any, ...] | None, images: dict[tuple[str, str], bytes]) -> bytes:
    """Serialize extra keys; ``images`` keeps what is the same in all blocks of an image."""
    if keys is None or len(keys) != 1 or len(keys[0]) != 3 or type(keys[0][2]) is not int:
        return _dumps(keys)
    kind, identifier, offset = keys[0]
    return _head(kind, identifier, images) + _integer(offset)


def _head(kind: str, identifier: str, images: dict[tuple[str, str], bytes]) -> bytes:
    """What comes before the offset in the serialized key of an image."""
    head = images.get((kind, identifier))
    if head is None:
        head = images[kind, identifier] = _dumps(((kind, identifier, 0),))[:-1]
    return head


def _alone_in_blocks(
    request: Request, item: int, images: dict[tuple[str, str], bytes]
) -> tuple[int, int, bytes]:
    """Return from which token to which nothing but image ``item`` makes extra keys.

    And the head of its keys. Those are blocks that end before the image does: vLLM looks at
    no other image then. With an adapter, which makes a key of its own, there are none.
    """
    if request.lora_request is not None or item >= len(request.mm_features):
        return 0, 0, b""
    image, last = request.mm_features[item], request.mm_features[-1].mm_position
    begin, length = image.mm_position.offset, image.mm_position.length
    # Images may overlap: behind the end of the last one vLLM looks at none.
    end = min(begin + length, last.offset + last.length)
    return begin, end, _head("mm", image.identifier, images)


def _samples(block_size: int) -> list[Request]:
    """Prompts with tokens of each serialized length and all that makes extra keys."""
    lengths = (0, 23, 24, 0xFF, 0x100, 0xFFFF, 0x10000, 0x7FFFFFFF)
    tokens = [lengths[n * n % 11 % 8] for n in range(40 * block_size + 1)]
    images = [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=f"image {number}",
            mm_position=PlaceholderRange(offset=offset * block_size + number, length=length),
        )
        for number, (offset, length) in enumerate(
            [(1, 3 * block_size), (5, 2), (5, block_size), (7, 20 * block_size)]
        )
    ]
    return [
        Request(
            request_id="sample",
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            arrival_time=0.0,
            mm_features=features,
            lora_request=LoRARequest("adapter", 1, "/adapter") if lora else None,
            cache_salt=salt,
        )
        for features in ([], images)
        for lora in (False, True)
        for salt in (None, "salt")
    ]
