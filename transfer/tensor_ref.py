"""Names for bytes in shared memory, small enough to travel in a request."""

from __future__ import annotations

from typing import Any

import msgspec


class ArenaId(msgspec.Struct, frozen=True, array_like=True):
    """Names one arena: the file of its segment and the nonce in its header.

    The nonce tells apart two hosts (or containers) that have a file of one name.
    """

    name: str
    nonce: bytes


class RemoteArena(msgspec.Struct, frozen=True, array_like=True):
    """An arena as a process on another host can read it, by NIXL.

    ``agent`` and ``metadata`` are those of the owner's NIXL agent; ``address`` is where
    the owner has the arena's file mapped, all ``nbytes`` of it registered.
    """

    arena: ArenaId
    agent: str
    metadata: bytes
    address: int
    nbytes: int


class EntryRef(msgspec.Struct, frozen=True, array_like=True):
    """Names one entry of an arena at one point of its life.

    ``offset`` and ``nbytes`` delimit the entry's payload within the segment, in bytes.
    ``generation`` differs for every entry that is ever written to an arena, so that a
    reference to replaced bytes is noticed. ``identity`` is the digest of the contents.
    """

    arena: str
    offset: int
    nbytes: int
    generation: int
    identity: bytes


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor within an entry: torch dtype name, shape, byte offset in the payload."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


class ItemRef(msgspec.Struct, frozen=True, array_like=True):
    """All tensors of one multimodal item that live in one entry.

    ``fields`` maps a field name to the place of its tensors in ``tensors``: an index,
    or nested lists of indices where the field is a list of tensors.
    """

    entry: EntryRef
    tensors: tuple[TensorSpec, ...]
    fields: dict[str, int | list[Any]]
