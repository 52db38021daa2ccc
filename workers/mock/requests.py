"""From a request as vLLM's frontend half sends it to one that a mock engine computes.

The answer is made from the prompt alone: the same prompt, images included, is always
answered with the same tokens, so the block hashes of the answer are known beforehand. Each
token is made from those before it: a prompt with the beginning of its answer behind it is
answered with the rest.

vLLM names relied on: utils.hashing.get_hash_fn_by_name;
v1.core.kv_cache_utils.get_request_block_hasher; v1.request.Request;
v1.engine.EngineCoreRequest; MultiModalFeatureSpec (identifier, mm_position).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass

import xxhash
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request

from transfer.block_hash_root import root_hash_of
from workers.mock.engine import EncoderItem, MockRequest

ANSWER_TOKENS = range(64, 90)
"""The letters a to z in byte-level vocabularies, whose first tokens are ASCII's."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A request for a mock engine, and the tokens it is going to be answered with."""

    request: MockRequest
    answer: list[int]
    trace_headers: Mapping[str, str] | None = None
    """Given back with every output, as vLLM does."""


class RequestReader:
    """Reads requests for engines of one block size and hash algorithm."""

    def __init__(self, block_size: int, algorithm: str, max_model_len: int) -> None:
        """``block_size`` and ``max_model_len`` are in tokens.

        Raises:
            ValueError: the algorithm is unknown or seeded at random.
        """
        root_hash_of(algorithm)  # sets vLLM's root, which its hasher reads
        self._max_model_len = max_model_len
        self._block_hasher = get_request_block_hasher(
            block_size, get_hash_fn_by_name(algorithm)
        )

    def read(self, request: EngineCoreRequest) -> Answered:
        """Hash the prompt, make up the answer, and hash that too.

        Raises:
            ValueError: a request that a mock cannot answer; the text says why.
        """
        if request.sampling_params is None:
            raise ValueError("a mock engine generates tokens only")
        if request.sampling_params.logprobs or request.sampling_params.prompt_logprobs:
            raise ValueError("a mock engine has no log-probabilities")
        if request.resumable:
            raise ValueError("a mock engine takes no input in parts")
        if request.prompt_token_ids is None:
            raise ValueError("a mock engine needs prompts of tokens")
        hashed = Request.from_engine_core_request(request, self._block_hasher)
        prompt_tokens = hashed.num_tokens
        room = self._max_model_len - prompt_tokens
        count = min(room, hashed.max_tokens)
        if count < 1:
            raise ValueError(f"a prompt of {prompt_tokens} tokens leaves no room to answer")
        items = tuple(
            EncoderItem(
                feature.identifier, feature.mm_position.offset, feature.mm_position.length
            )
            for feature in request.mm_features or ()
        )
        answer = answer_to(request.prompt_token_ids, items, count)
        hashed.append_output_token_ids(answer)
        return Answered(
            MockRequest(
                request_id=request.request_id,
                prompt_tokens=prompt_tokens,
                answer_tokens=count,
                digests=[bytes(digest) for digest in hashed.block_hashes],
                items=items,
                reads_cache=not hashed.skip_reading_prefix_cache,
            ),
            answer,
            request.trace_headers,
        )


def answer_to(prompt: list[int], items: tuple[EncoderItem, ...], count: int) -> list[int]:
    """Return ``count`` tokens, each made from the images and all tokens before it."""
    digest = xxhash.xxh3_64()
    for item in items:
        digest.update(item.identity.encode())
    digest.update(array("q", prompt).tobytes())
    answer = []
    for _ in range(count):
        token = ANSWER_TOKENS[digest.intdigest() % len(ANSWER_TOKENS)]
        digest.update(token.to_bytes(8, sys.byteorder))
        answer.append(token)
    return answer
