"""What goes over the wire comes out as it went in, and nothing else comes out."""

from __future__ import annotations

import os
import pickle
import warnings
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

from tests.fakes import make_facts, make_item, make_request
from transfer import messages
from transfer.errors import BadMessage
from transfer.messages import decode, decode_outputs, decode_request, encode, encode_payload
from transfer.process import this_process
from transfer.tensor_ref import ArenaId, EntryRef, RemoteArena

ARENA = ArenaId("foveal-1-2-ab", b"n" * 16)
REMOTE_ARENA = RemoteArena(ARENA, "agent", b"metadata", 1 << 40, 8192)
OFFER = messages.EmbeddingOffer(
    REMOTE_ARENA, EntryRef("foveal-1-2-ab", 4160, 1000, 7, b"i" * 16)
)
ALL_MESSAGES: list[messages.Message] = [
    messages.Hello(
        frontend="f", protocol=1, arena=ARENA, transfer="auto", identity_seed_fingerprint="s"
    ),
    messages.Ready(
        worker="w",
        facts=make_facts(),
        epoch="e",
        kv_address="ipc://kv",
        transfer="shm",
        transfer_reason="why",
        process=this_process(),
    ),
    messages.Refused(worker="w", reason="why"),
    messages.AddRequest("r", 1, 500, 16),
    messages.AbortRequests(["r", "s"]),
    messages.Call(7, "sleep"),
    messages.CallResult(7, "no"),
    messages.Outputs(),
    messages.Released(["r"]),
    messages.TensorsMissing("r", "why", 2),
    messages.NixlOffer(REMOTE_ARENA),
    messages.TransferChosen("nixl", "why"),
    messages.Pulling(10.0, 1, 2, 3),
    messages.ExportEmbedding(7, "image-" + "0" * 32),
    messages.EmbeddingExported(7, OFFER),
    messages.PullEmbedding(7, "image-" + "0" * 32, OFFER),
    messages.EmbeddingPulled(7, "why"),
    messages.ReleaseEmbedding(7),
    messages.AskSnapshot(),
    messages.KvSnapshot("e", 3, {"GPU": [b"a" * 32]}),
    messages.KvDelta("e", 4, {"GPU": [b"a"]}, {"CPU": [b"b"]}, True),
    messages.LoadReport(
        epoch="e",
        seq=4,
        running=2,
        waiting=1,
        kv_blocks=17,
        shares={"f": messages.FrontendShare(3, 500, 20)},
        encoder_resets=1,
    ),
    messages.Ping(),
    messages.Pong("e", 4),
    messages.Draining(25.0),
    messages.Bye(),
]


def received(frames: Sequence[messages.Frame]) -> list[messages.Frame]:
    """Frames as they arrive: the tensors of a payload lie in writable memory."""
    return [bytearray(frame) for frame in frames]


def decode_anything(frames: Sequence[messages.Frame]) -> object:
    return messages.decode_payload_as(object, frames)


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


@pytest.mark.parametrize("message", ALL_MESSAGES, ids=lambda m: type(m).__name__)
def test_every_message_comes_out_as_it_went_in(message: messages.Message) -> None:
    frames = encode(message, [b"one", b"two"])
    decoded, payload = decode(frames)
    assert decoded == message
    assert list(payload) == [b"one", b"two"]


def test_no_kind_of_message_is_left_out_here() -> None:
    assert {type(m) for m in ALL_MESSAGES} == set(messages.Message.__args__)


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
@pytest.mark.parametrize("decoder", [decode_request, decode_outputs, decode_anything])
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


def test_no_frames_at_all_are_no_message() -> None:
    with pytest.raises(BadMessage):
        decode([])
    with pytest.raises(BadMessage):
        decode_request([])


def no_more_than_bad(decoder: Any, frames: Sequence[messages.Frame]) -> None:
    with warnings.catch_warnings():
        # Hostile bytes may name what numpy has deprecated.
        warnings.simplefilter("ignore")
        try:
            decoder(frames)
        except BadMessage:
            return


FRAMES = st.lists(st.binary(max_size=200).map(bytearray), max_size=4)


@given(FRAMES)
def test_random_frames_are_a_bad_message_or_none_at_all(frames: list[bytearray]) -> None:
    for decoder in (decode, decode_request, decode_outputs, decode_anything):
        no_more_than_bad(decoder, frames)


VALID: list[tuple[Any, list[messages.Frame]]] = [
    (decode_request, received(encode_payload(make_request(items=[make_item(2.0)])))),
    (decode_outputs, received(encode_payload(outputs_with_arrays()))),
    (decode, received(encode(ALL_MESSAGES[1]))),
    (decode, received(encode(ALL_MESSAGES[11]))),
    (decode_anything, received(encode_payload(["x", 1, {"a": [True]}]))),
]


@given(
    st.sampled_from(VALID),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4),
    st.booleans(),
    st.integers(0, 3),
)
def test_a_valid_message_with_some_bytes_changed_is_bad_or_still_one(
    valid: tuple[Any, list[messages.Frame]],
    changes: list[tuple[int, int]],
    cut: bool,
    lost: int,
) -> None:
    decoder, frames = valid
    head = bytearray(frames[0])
    for place, value in changes:
        head[place % len(head)] = value
    if cut:
        del head[changes[0][0] % len(head) :]
    no_more_than_bad(decoder, [head, *frames[1 : len(frames) - lost]])


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
