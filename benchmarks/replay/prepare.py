"""Hashes a trace once, with the frontend's own code, for all replays of it.

vLLM names relied on: EngineCoreRequest, SamplingParams, MultiModalFeatureSpec,
PlaceholderRange.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from benchmarks.replay.trace import TraceRequest, answer_tokens_of, images_of, tokens_of
from frontend.router.block_hashes import RequestBlocks, RequestHasher
from transfer.block_hash_root import root_hash_of
from workers.mock.engine import EncoderItem, MockRequest

HASH_ALGORITHM = "sha256_cbor"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request of a trace with its block hashes."""

    request: TraceRequest
    prompt: RequestBlocks
    """What the router gets."""
    digests: list[bytes]
    """Prompt and answer: what the engine fills its blocks with."""
    items: tuple[EncoderItem, ...]

    def for_engine(self) -> MockRequest:
        return MockRequest(
            request_id=self.request.id,
            prompt_tokens=self.prompt.num_tokens,
            answer_tokens=self.request.answer_tokens,
            digests=self.digests,
            items=self.items,
        )


def prepare(trace: Sequence[TraceRequest], block_size: int) -> list[Prepared]:
    """Hash the requests of ``trace`` by blocks of ``block_size`` tokens."""
    hasher = RequestHasher(block_size, HASH_ALGORITHM, root_hash_of(HASH_ALGORITHM))
    return [_prepare(request, hasher) for request in trace]


def _prepare(request: TraceRequest, hasher: RequestHasher) -> Prepared:
    # Prompt and answer are hashed in one go; the prompt's blocks are the first of them.
    whole = hasher.hash(_engine_request(request))
    size = whole.block_size
    prompt_tokens = request.prompt_tokens
    prompt = dataclasses.replace(
        whole,
        digests=whole.digests[: prompt_tokens // size],
        reusable=(prompt_tokens - 1) // size,
        num_tokens=prompt_tokens,
    )
    items = tuple(EncoderItem(*image) for image in images_of(request.prompt))
    return Prepared(request, prompt, whole.digests, items)


def _engine_request(request: TraceRequest) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request.id,
        prompt_token_ids=tokens_of(request.prompt) + answer_tokens_of(request),
        mm_features=[
            MultiModalFeatureSpec(
                data=None,
                modality="image",
                identifier=identity,
                mm_position=PlaceholderRange(offset=offset, length=length),
                mm_hash=identity,
            )
            for identity, offset, length in images_of(request.prompt)
        ],
        sampling_params=SamplingParams(max_tokens=request.answer_tokens),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
