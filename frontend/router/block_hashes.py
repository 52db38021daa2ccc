"""The block hashes that the engine itself will compute for a request.

The request goes through vLLM's own ``Request`` with a block hasher that gives vLLM's own
hashes, as it will in the engine, so images, LoRA, cache salt and prompt embeddings enter
the hashes exactly as they do there.

vLLM names relied on: v1.request.Request;
v1.engine.EngineCoreRequest (mm_features: identifier, mm_position).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request

from frontend.router.cbor_block_hasher import block_hasher
from frontend.router.image_affinity import PromptImage
from transfer.block_hash_root import root_hash_of


class RootHashMismatch(ValueError):
    """A worker's block hashes start from another root than this process's."""


@dataclass(frozen=True, slots=True)
class RequestBlocks:
    """The full blocks of a prompt."""

    digests: list[bytes]
    reusable: int
    """How many leading blocks the engine may take from its cache at most."""
    num_tokens: int
    block_size: int
    """Tokens per block."""
    images: tuple[PromptImage, ...] = ()
    """The multimodal items, by place in the prompt."""
    last_match_dropped: bool = False
    """Whether the engine computes the last block that it finds cached once more."""


class RequestHasher:
    """Computes block hashes for engines of one block size, algorithm and root."""

    def __init__(
        self,
        block_size: int,
        algorithm: str,
        root_hash: str,
        drops_last_match: bool = False,
    ) -> None:
        """Take the values from what a worker stated about its engine.

        Raises:
            RootHashMismatch: this process starts its chains from another root.
            ValueError: the algorithm is unknown or seeded at random.
        """
        own_root = root_hash_of(algorithm)
        if own_root != root_hash:
            raise RootHashMismatch(
                f"block hashes start from {root_hash} in the worker and from {own_root} "
                f"here (algorithm {algorithm}): give worker and frontend the same "
                "PYTHONHASHSEED, or none, and the same --prefix-caching-hash-algo"
            )
        self.block_size = block_size
        self._drops_last_match = drops_last_match
        self._block_hasher = block_hasher(block_size, algorithm)

    def hash(self, request: EngineCoreRequest) -> RequestBlocks:
        """Hash the full blocks of the prompt; ``request`` is neither kept nor changed.

        The list of token ids is copied once, tensors are not, except that prompt
        embeddings are read to be hashed.
        """
        engine_side = Request.from_engine_core_request(request, self._block_hasher)
        num_tokens = engine_side.num_tokens
        # The engine computes at least the last token, for its logits, and takes whole
        # blocks only (KVCacheManager.get_computed_blocks).
        reusable = max(0, num_tokens - 1) // self.block_size
        if engine_side.skip_reading_prefix_cache:
            reusable = 0
        return RequestBlocks(
            digests=cast("list[bytes]", engine_side.block_hashes),
            reusable=reusable,
            num_tokens=num_tokens,
            block_size=self.block_size,
            images=tuple(
                PromptImage(
                    feature.identifier,
                    feature.mm_position.offset,
                    feature.mm_position.length,
                )
                for feature in request.mm_features or ()
            ),
            last_match_dropped=self._drops_last_match,
        )
