"""Requests and outputs come out as they went in, and nothing else comes out."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason, UtilityOutput
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import (
    CUSTOM_TYPE_CLOUDPICKLE,
    CUSTOM_TYPE_PICKLE,
    MsgpackDecoder,
)

from tests.fakes import make_item, make_request
from tests.transfer.hostile_frames import FRAMES, no_more_than_bad, received, spoiled
from transfer.errors import BadMessage
from transfer.messages import Frame
from transfer.payload import (
    decode_outputs,
    decode_payload_as,
    decode_request,
    encode_payload,
)


def decode_anything(frames: Sequence[Frame]) -> object:
    return decode_payload_as(object, frames)


DECODERS = [decode_request, decode_outputs, decode_anything]


def outputs_with_arrays() -> EngineCoreOutputs:
    logprobs = LogprobsLists(
        np.arange(6, dtype=np.int64).reshape(2, 3),
        np.linspace(-3, 0, 6, dtype=np.float32).reshape(2, 3),
        np.array([1, 2]),
    )
    output = EngineCoreOutput(
        "r",
        [5, 6],
        new_logprobs=logprobs,
        pooling_output=torch.arange(2000.0),
        finish_reason=FinishReason.STOP,
    )
    return EngineCoreOutputs(
        outputs=[output], scheduler_stats=SchedulerStats(3), timestamp=1.5
    )


def test_a_request_comes_out_with_its_tensors_bit_for_bit() -> None:
    pixels = torch.rand(50, 100).to(torch.bfloat16)
    request = make_request(items=[make_item(pixels), make_item(1.0)])
    decoded = decode_request(received(encode_payload(request)))
    assert decoded.prompt_token_ids == request.prompt_token_ids
    assert decoded.sampling_params == request.sampling_params
    assert decoded.mm_features == request.mm_features


def test_large_tensors_of_a_request_are_not_copied_on_either_side() -> None:
    pixels = torch.rand(50, 100)
    frames = encode_payload(make_request(items=[make_item(pixels)]))
    (large,) = [f for f in frames[1:] if memoryview(f).nbytes == pixels.nbytes]
    assert np.shares_memory(np.frombuffer(large, np.uint8), pixels.numpy())
    memory = bytearray(large)
    arrived = received(frames[:1]) + [memory if f is large else f for f in frames[1:]]
    (feature,) = decode_request(arrived).mm_features or ()
    assert feature.data is not None
    decoded = feature.data["pixel_values"].data
    assert np.shares_memory(decoded.numpy(), np.frombuffer(memory, np.uint8))


def test_outputs_come_out_with_their_arrays() -> None:
    outputs = outputs_with_arrays()
    decoded = decode_outputs(received(encode_payload(outputs)))
    (theirs,), (ours,) = decoded.outputs, outputs.outputs
    assert (theirs.request_id, theirs.new_token_ids) == ("r", [5, 6])
    assert theirs.finish_reason is FinishReason.STOP
    assert theirs.new_logprobs is not None and ours.new_logprobs is not None
    for one, other in zip(theirs.new_logprobs[:3], ours.new_logprobs[:3], strict=True):
        np.testing.assert_array_equal(one, other)
    assert theirs.pooling_output is not None and ours.pooling_output is not None
    assert torch.equal(theirs.pooling_output, ours.pooling_output)
    assert decoded.scheduler_stats == outputs.scheduler_stats


class Trap:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("code", [CUSTOM_TYPE_PICKLE, CUSTOM_TYPE_CLOUDPICKLE])
@pytest.mark.parametrize("decoder", DECODERS)
def test_pickle_is_refused_although_the_environment_allows_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, decoder: Any, code: int
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    trap = tmp_path / "sprung"
    pickled = msgspec.msgpack.Ext(code, pickle.dumps(Trap(trap)))
    for value in (pickled, ["r", pickled], {"a": pickled}):
        with pytest.raises(BadMessage):
            decoder([msgspec.msgpack.encode(value)])
    assert not trap.exists()
    # vLLM's own decoder does open it here: the trap works.
    MsgpackDecoder().decode([msgspec.msgpack.encode(pickled)])
    assert trap.exists()


def test_types_named_by_the_sender_are_refused() -> None:
    outputs = msgspec.to_builtins(EngineCoreOutputs())
    outputs[4:5] = [msgspec.to_builtins(UtilityOutput(1))]
    outputs[4][2] = [["os", "system"], "true"]
    with pytest.raises(BadMessage):
        decode_outputs([msgspec.msgpack.encode(outputs)])


@pytest.mark.parametrize("decoder", DECODERS)
def test_no_frames_at_all_are_no_payload(decoder: Any) -> None:
    with pytest.raises(BadMessage):
        decoder([])


@given(FRAMES)
def test_random_frames_are_a_bad_message_or_none_at_all(frames: list[Frame]) -> None:
    for decoder in DECODERS:
        no_more_than_bad(decoder, frames)


VALID: list[tuple[Any, Sequence[Frame]]] = [
    (decode_request, encode_payload(make_request(items=[make_item(2.0)]))),
    (decode_outputs, encode_payload(outputs_with_arrays())),
    (decode_anything, encode_payload(["x", 1, {"a": [True]}])),
]


@pytest.mark.parametrize(("decoder", "valid"), VALID)
@given(st.data())
def test_a_valid_payload_with_some_bytes_changed_is_bad_or_still_one(
    decoder: Any, valid: Sequence[Frame], data: st.DataObject
) -> None:
    no_more_than_bad(decoder, data.draw(spoiled(received(valid))))


@given(st.text(max_size=12), st.lists(st.integers(-(2**63), 2**64 - 1), max_size=3))
@example("(1,2", [2])
@example("O", [1])
@example("a4", [1])
@example("float32", [2**63])
def test_arrays_of_impossible_types_and_shapes_are_bad(dtype: str, shape: list[int]) -> None:
    array = [dtype, shape, msgspec.msgpack.Ext(3, b"\0" * 16)]
    output = ["r", [1], [array, array, array, None]]
    no_more_than_bad(decode_outputs, [msgspec.msgpack.encode([0, [output]])])
    output = ["r", [1], None, None, array]
    no_more_than_bad(decode_outputs, [msgspec.msgpack.encode([0, [output]])])
