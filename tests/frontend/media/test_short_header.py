from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from frontend.media.short_header import MOST_PARTS, PNG_BYTES, short_header


def picture(kind: str, mode: str = "RGB", seed: int = 1, **extra: Any) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (60, 80, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(out, kind, **extra)
    return out.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    checksum = struct.pack(">I", zlib.crc32(kind + data))
    return struct.pack(">I", len(data)) + kind + data + checksum


def png_with(*chunks: bytes) -> bytes:
    """A PNG with these chunks right behind its first."""
    data = picture("PNG")
    return data[:33] + b"".join(chunks) + data[33:]


@pytest.mark.parametrize(
    "data",
    [
        picture("JPEG"),
        picture("JPEG", "L"),
        picture("JPEG", "CMYK"),
        picture("JPEG", progressive=True, quality=95, subsampling=0),
        picture("JPEG", icc_profile=bytes(100_000), comment=b"hello"),
        picture("PNG"),
        picture("PNG", "P"),
        png_with(chunk(b"tEXt", b"Comment\0hello")),
    ],
)
def test_a_header_is_all_that_pillow_needs(data: bytes) -> None:
    header = short_header(data)
    assert header is not None
    assert data.startswith(header)
    with Image.open(io.BytesIO(data)) as whole, Image.open(io.BytesIO(header)) as cut:
        assert (cut.format, cut.mode, cut.size) == (whole.format, whole.mode, whole.size)
        assert cut.info == whole.info


def test_pixels_are_no_part_of_it() -> None:
    first, second = picture("JPEG", seed=1), picture("JPEG", seed=2)
    assert first != second
    assert short_header(first) == short_header(second)


@pytest.mark.parametrize("kind", ["GIF", "BMP", "TIFF", "WEBP"])
def test_other_formats_have_none(kind: str) -> None:
    assert short_header(picture(kind)) is None


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff\xd8", b"\xff\xd8\xff", b"\xff\xd8" + b"\xff" * 100, b"\xff\xd8abcdefgh",
     b"\x89PNG\r\n\x1a\n", b"\x89PNG\r\n\x1a\n" + bytes(100), picture("PNG")[:40],
     picture("JPEG")[:200]],
)
def test_what_ends_before_its_pixels_has_none(data: bytes) -> None:
    assert short_header(data) is None


def test_many_segments_are_not_short() -> None:
    data = picture("JPEG")
    few, many = (b"\xff\xe5\x00\x02" * count for count in (9, MOST_PARTS))
    assert short_header(data[:2] + few + data[2:]) is not None
    assert short_header(data[:2] + many + data[2:]) is None


def test_metadata_that_inflate_are_not_short() -> None:
    bomb = zlib.compress(bytes(1 << 20), 9)
    assert short_header(png_with(chunk(b"zTXt", b"a\0\0" + bomb))) is not None
    many = [chunk(b"zTXt", b"a\0\0" + bomb)] * (PNG_BYTES // len(bomb) + 1)
    assert short_header(png_with(*many)) is None
