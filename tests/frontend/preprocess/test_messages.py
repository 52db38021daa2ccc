from __future__ import annotations

import socket

import pytest

from frontend.preprocess.messages import (
    BlockingLine,
    Media,
    Message,
    Place,
    Setup,
    Up,
    Work,
    decode,
    encode,
    length_prefix,
)
from transfer.errors import BadMessage, PeerLost
from transfer.tensor_ref import ArenaId

MESSAGES: list[Message] = [
    Setup(
        ("--model", "m"), ArenaId("foveal-1-2-ab", bytes(16)), bytes(32), "xxh3_128", "idle",
    ),
    Work(
        "image", Media(b"\x00data", None, (0, 1, 2), "L"),
        {"a": [1, 2.5, None, {"b": True}]},
    ),
    Place(None),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_messages_survive_the_way(message: Message) -> None:
    assert decode(encode(message)) == message


def test_what_is_no_message_is_refused() -> None:
    with pytest.raises(BadMessage):
        decode(b"\x93\x01\x02\x03")


def test_options_that_are_not_plain_data_cannot_be_sent() -> None:
    with pytest.raises(TypeError):
        encode(Work("image", Media(b"", None, (0, 0, 0), "L"), {"a": object()}))


def test_a_line_carries_messages_whole() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        body = encode(Up(7))
        ours.sendall(length_prefix(body)[:2])
        ours.sendall(length_prefix(body)[2:] + body)
        line = BlockingLine(theirs)
        assert line.receive() == Up(7)
        ours.sendall(length_prefix(body) + body[:-1])
        ours.shutdown(socket.SHUT_WR)
        with pytest.raises((PeerLost, BadMessage)):
            line.receive()
        with pytest.raises(PeerLost):
            line.receive()
