"""What the frontend and its preprocess processes say to each other.

Two lines. One goes to the template, which has the model's processor loaded and starts
preprocess processes by forking itself: ``Setup``, answered by ``TemplateReady`` or
``SetupFailed``, then one byte and a socket for every process that is wanted. The other
is that socket; the process says ``Up``, and from then on works on one item at a time:

    frontend -> process   Work       the encoded media
    process -> frontend   Began      if it is lost from here on, it may be the item's fault
    process -> frontend   Measured   how many bytes its tensors take     (if any are large)
    frontend -> process   Place      where they may be written, or that there is no room
    process -> frontend   Done       what they are, and all that is small

or ``Failed`` in place of what was due. Pixels never take this way: the process writes
them into the arena itself. Nothing is pickled.
"""

from __future__ import annotations

import socket
import struct
from typing import Any, Literal

import msgspec

from transfer.errors import BadMessage, PeerLost
from transfer.tensor_ref import ArenaId, TensorSpec

_LENGTH = struct.Struct("<I")
LENGTH_BYTES = _LENGTH.size


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The first message to the template."""

    arguments: tuple[str, ...]
    """The frontend's command line, from which it made its own configuration."""
    arena: ArenaId
    seed: bytes
    algorithm: str
    priority: Literal["idle", "low"]
    """Of the processes, from when the template is ready."""


class TemplateReady(msgspec.Struct, frozen=True, tag=True):
    """The processor is loaded and has processed a first image."""


class SetupFailed(msgspec.Struct, frozen=True, tag=True):
    reason: str


class Up(msgspec.Struct, frozen=True, tag=True):
    pid: int


class Media(msgspec.Struct, frozen=True, array_like=True):
    """An image as it came, and how it is to be decoded."""

    data: bytes
    image_mode: str | None
    """What the decoded image is converted to; None leaves it as it is."""
    background: tuple[int, int, int]
    """What shows through transparent parts when that loses an alpha channel."""
    mode: str
    """PIL mode that decoding must yield: what the header promised, and the hash covers."""


class Work(msgspec.Struct, frozen=True, tag=True):
    """One item to process."""

    modality: str
    media: Media
    processor_options: dict[str, Any]


class Began(msgspec.Struct, frozen=True, tag=True):
    """The process has the work and begins."""


class Measured(msgspec.Struct, frozen=True, tag=True):
    nbytes: int


class Place(msgspec.Struct, frozen=True, tag=True):
    """``offset`` in the arena's file; None when it has no room."""

    offset: int | None


class PromptUpdate(msgspec.Struct, frozen=True, array_like=True):
    """What one image does to the prompt, as token ids."""

    modality: str
    mode: str
    target: list[int] | str
    content: list[int]
    embedded: list[int] | None
    """Which tokens of ``content`` stand for embeddings; None for all."""


class Done(msgspec.Struct, frozen=True, tag=True):
    """The item is processed, and its large tensors are where ``Place`` said."""

    identity: bytes
    nbytes: int
    tensors: tuple[TensorSpec, ...]
    fields: dict[str, int | list[Any]]
    """Where its large tensors are, as in ``transfer.pack.ItemPlan``; empty if it has none."""
    item: list[bytes]
    """The rest of the item, in vLLM's encoding."""
    updates: list[PromptUpdate]
    copy_seconds: float = 0.0
    """How long writing the tensors took."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    unreadable: bool
    """Whether the media cannot be decoded, which is the client's fault."""
    reason: str


Message = (
    Setup
    | TemplateReady
    | SetupFailed
    | Up
    | Work
    | Began
    | Measured
    | Place
    | Done
    | Failed
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Raises: TypeError: a processor option is not plain data."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """Raises: BadMessage: it is not one of ours."""
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise BadMessage(str(error)) from error


def length_prefix(body: bytes) -> bytes:
    """What stands before a message on a stream: its length in bytes."""
    return _LENGTH.pack(len(body))


def length_of(prefix: bytes) -> int:
    return int(_LENGTH.unpack(prefix)[0])


class BlockingLine:
    """A process's end of its line to the frontend."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = connection.makefile("rb")

    def send(self, message: Message) -> None:
        body = encode(message)
        self._connection.sendall(length_prefix(body) + body)

    def receive(self) -> Message:
        """Raises: PeerLost: the frontend has closed the line, or is gone."""
        prefix = self._reader.read(LENGTH_BYTES)
        body = self._reader.read(length_of(prefix)) if len(prefix) == LENGTH_BYTES else b""
        if not body:
            raise PeerLost("the frontend is gone")
        return decode(body)
