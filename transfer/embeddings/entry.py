"""One encoder output as a file: what it holds, and how a reader knows that it is whole.

A header of ``HEADER_BYTES`` says whose output this is, of which model, and what it must
look like; the elements follow, in row-major order. The header has a check sum of its own
and one of the elements, so that bytes of anything else, or half of an entry, are refused.

Entries are read with ``pread`` and never mapped: a file that shrinks is then an error and
not a signal, and a reader's memory is its own.
"""

from __future__ import annotations

import os
import re
import struct
from math import prod

import msgspec
import torch
import xxhash

from transfer.errors import StaleRef
from transfer.identity import tensor_bytes

HEADER_BYTES = 512
IDENTIFIER = re.compile(r"[a-z_]{1,32}-[0-9a-f]{32}(?:[0-9a-f]{32})?", re.ASCII)
"""A modality and a canonical identity. What has anything before it, such as the name of an
adapter that changes the encoder's output, does not name contents alone and is not kept."""

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
}

_MAGIC = b"FOVEALEM"
_FRAME = struct.Struct("<8sIQ")  # magic, bytes of the description, its check sum
_CHUNK_BYTES = 1 << 20


class Description(msgspec.Struct, frozen=True, array_like=True):
    """What an entry states of itself."""

    model_key: str
    """Names the model and all that its encoder's output depends on."""
    identifier: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    checksum: bytes
    """xxh3_128 of the elements."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Description)


def describe(model_key: str, identifier: str, tensor: torch.Tensor) -> Description | None:
    """Describe an output that is to be kept; None when it is of no kind that can be."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES or tensor.layout != torch.strided:
        return None
    elements = tensor_bytes(tensor)
    return Description(
        model_key, identifier, dtype, tuple(tensor.shape), elements.nbytes,
        xxhash.xxh3_128_digest(elements),
    )


def header(description: Description) -> bytes:
    """Return the ``HEADER_BYTES`` bytes before the elements.

    Raises:
        ValueError: the description is too long.
    """
    body = _encoder.encode(description)
    frame = _FRAME.pack(_MAGIC, len(body), xxhash.xxh3_64_intdigest(body))
    if len(frame) + len(body) > HEADER_BYTES:
        raise ValueError(f"a header of {len(frame) + len(body)} bytes")
    return (frame + body).ljust(HEADER_BYTES, b"\0")


def write_entry(fd: int, description: Description, elements: memoryview) -> None:
    """Write an entry; its header last. The file has its size already.

    Raises:
        OSError: it could not be written.
    """
    offset = HEADER_BYTES
    while elements.nbytes:
        written = os.pwrite(fd, elements[:_CHUNK_BYTES], offset)
        elements, offset = elements[written:], offset + written
    os.pwrite(fd, header(description), 0)


def read_description(fd: int, model_key: str, identifier: str) -> Description:
    """Return what an entry states, once that is what was asked for.

    Raises:
        StaleRef: it is no entry, or another one.
    """
    raw, size = os.pread(fd, HEADER_BYTES, 0), os.fstat(fd).st_size
    return checked_description(raw, size, model_key, identifier)


def checked_description(
    raw: bytes, size: int, model_key: str, identifier: str
) -> Description:
    """Return what the header ``raw`` of an entry of ``size`` bytes states.

    Raises:
        StaleRef: it is no header, of another entry, or of one of another size.
    """
    if len(raw) != HEADER_BYTES:
        raise StaleRef("no header")
    magic, length, checksum = _FRAME.unpack_from(raw)
    body = raw[_FRAME.size : _FRAME.size + length]
    if magic != _MAGIC or xxhash.xxh3_64_intdigest(body) != checksum:
        raise StaleRef("a header that is not whole")
    try:
        stated = _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise StaleRef(f"a header that does not decode: {error}") from error
    if (stated.model_key, stated.identifier) != (model_key, identifier):
        raise StaleRef(f"{stated.identifier} of model {stated.model_key}")
    dtype = DTYPES.get(stated.dtype)
    fits = dtype is not None and min(stated.shape, default=0) >= 0
    if not fits or prod(stated.shape) * dtype.itemsize != stated.nbytes:  # type: ignore[union-attr]
        raise StaleRef(f"{stated.nbytes} bytes of {stated.dtype} for shape {stated.shape}")
    if size != HEADER_BYTES + stated.nbytes:
        raise StaleRef("an entry of another size")
    return stated


def read_elements(fd: int, stated: Description) -> torch.Tensor:
    """Return the tensor of an entry, in memory of its own.

    Raises:
        StaleRef: these are not the bytes that were written.
    """
    tensor = torch.empty(stated.shape, dtype=DTYPES[stated.dtype])
    read_elements_into(fd, stated, tensor_bytes(tensor))
    return tensor


def read_elements_into(fd: int, stated: Description, memory: memoryview) -> None:
    """Copy the ``stated.nbytes`` bytes of an entry's elements to ``memory``.

    Raises:
        StaleRef: these are not the bytes that were written.
    """
    whole, offset = memory, HEADER_BYTES
    while memory.nbytes:
        got = os.preadv(fd, [memory[:_CHUNK_BYTES]], offset)
        if got == 0:
            raise StaleRef("the file has shrunk")
        memory, offset = memory[got:], offset + got
    check_elements(whole, stated)


def check_elements(elements: memoryview, stated: Description) -> None:
    """
    Raises:
        StaleRef: these are not the bytes that were written.
    """
    if xxhash.xxh3_128_digest(elements) != stated.checksum:
        raise StaleRef("its bytes have changed")
