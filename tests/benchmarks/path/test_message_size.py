from __future__ import annotations

import msgspec
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from benchmarks.path.message_size import size_of
from transfer.messages import AddRequest, encode
from transfer.payload import encode_payload


def request_of(tokens: list[int]) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id="r",
        prompt_token_ids=tokens,
        mm_features=None,
        sampling_params=SamplingParams(),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        prompt_embeds=None,
    )


def sent(request: EngineCoreRequest) -> list[bytearray]:
    # torch wants the memory under its tensors writable.
    return [bytearray(frame) for frame in encode(AddRequest("r"), encode_payload(request))]


def test_token_ids_are_taken_off_as_they_were_encoded() -> None:
    few = size_of(sent(request_of([1])))
    ids = [1, 200, 70000, 151655] * 500
    many = size_of(sent(request_of(ids)))
    assert many.tokens == 2000
    assert many.token_bytes == len(msgspec.msgpack.encode(ids))
    assert many.beyond_tokens == few.beyond_tokens


def test_a_tensor_that_travels_counts() -> None:
    request = request_of([1])
    request.prompt_embeds = torch.zeros(1000, 10)
    size = size_of(sent(request))
    assert size.total > 40_000
