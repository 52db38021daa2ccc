"""The bytes of an arena's file, as its owner writes and its readers check them.

The first page is the arena's header. Every entry starts on a page of its own with an
``ENTRY_HEADER_BYTES`` long header, its payload right behind it. An entry's header is
written last and wiped first: a reference is good exactly while the header it implies
stands before the payload it names.
"""

from __future__ import annotations

import mmap
import re
import struct
from pathlib import Path

from transfer.tensor_ref import EntryRef

SHM = Path("/dev/shm")
NAME_PREFIX = "foveal-"
NAME_PATTERN = re.compile(r"foveal-(\d+)-(\d+)-[0-9a-f]+", re.ASCII)
"""Process id and start time of the owner, then a random part."""

PAGE_BYTES = mmap.PAGESIZE
NONCE_BYTES = 16
VERSION = 1

_ARENA_MAGIC = b"FOVEALAR"
_ENTRY_MAGIC = b"FOVEALEN"

# Magic, version, nonce, process id, start time in clock ticks, file size in bytes.
_ARENA_HEADER = struct.Struct(f"<8sQ{NONCE_BYTES}sQQQ")
ARENA_HEADER_BYTES = _ARENA_HEADER.size

# Magic, generation, payload bytes, identity bytes, identity padded with zeros.
_ENTRY_HEADER = struct.Struct("<8sQQQ32s")
ENTRY_HEADER_BYTES = _ENTRY_HEADER.size
WIPED_ENTRY_HEADER = bytes(ENTRY_HEADER_BYTES)
IDENTITY_LENGTHS = range(16, 33)


def arena_header(nonce: bytes, pid: int, start_time: int, size: int) -> bytes:
    """Return the header of an arena whose file has ``size`` bytes."""
    return _ARENA_HEADER.pack(_ARENA_MAGIC, VERSION, nonce, pid, start_time, size)


def arena_nonce_and_size(header: bytes) -> tuple[bytes, int] | None:
    """Return what an arena's header states; None when it is not such a header."""
    if len(header) != ARENA_HEADER_BYTES:
        return None
    magic, version, nonce, _, _, size = _ARENA_HEADER.unpack(header)
    return (nonce, size) if (magic, version) == (_ARENA_MAGIC, VERSION) else None


def entry_header(ref: EntryRef) -> bytes:
    """Return the header that stands before the payload of ``ref`` while it is good.

    Raises:
        ValueError: no entry can have these values.
    """
    if len(ref.identity) not in IDENTITY_LENGTHS:
        raise ValueError(f"an identity of {len(ref.identity)} bytes")
    try:
        return _ENTRY_HEADER.pack(
            _ENTRY_MAGIC, ref.generation, ref.nbytes, len(ref.identity), ref.identity
        )
    except struct.error as error:
        raise ValueError(f"generation {ref.generation}, {ref.nbytes} bytes") from error
