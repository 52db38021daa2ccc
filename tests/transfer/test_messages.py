"""What goes over the wire comes out as it went in, and nothing else comes out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import make_facts
from tests.transfer.hostile_frames import FRAMES, no_more_than_bad, spoiled
from transfer import messages
from transfer.errors import BadMessage
from transfer.messages import Frame, decode, encode
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


@pytest.mark.parametrize("message", ALL_MESSAGES, ids=lambda m: type(m).__name__)
def test_every_message_comes_out_as_it_went_in(message: messages.Message) -> None:
    frames = encode(message, [b"one", b"two"])
    decoded, payload = decode(frames)
    assert decoded == message
    assert list(payload) == [b"one", b"two"]


def test_no_kind_of_message_is_left_out_here() -> None:
    assert {type(m) for m in ALL_MESSAGES} == set(messages.Message.__args__)


def test_no_frames_at_all_are_no_message() -> None:
    with pytest.raises(BadMessage):
        decode([])


@given(FRAMES)
def test_random_frames_are_a_bad_message_or_none_at_all(frames: list[Frame]) -> None:
    no_more_than_bad(decode, frames)


@given(st.sampled_from([ALL_MESSAGES[1], ALL_MESSAGES[11]]).map(encode).flatmap(spoiled))
def test_a_valid_message_with_some_bytes_changed_is_bad_or_still_one(
    frames: list[Frame],
) -> None:
    no_more_than_bad(decode, frames)
