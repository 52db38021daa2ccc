from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image

from frontend.media.short_header import MOST_BYTES, MOST_EXIF_BYTES, short_header

EXIF = Image.Exif()
EXIF[ExifTags.Base.Orientation] = 6


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
        picture("JPEG", icc_profile=bytes(3000), comment=b"hello"),
        picture("JPEG", exif=EXIF),
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


def test_long_headers_are_not_short() -> None:
    assert short_header(picture("JPEG", icc_profile=bytes(MOST_BYTES))) is None
    assert short_header(png_with(chunk(b"tEXt", bytes(MOST_BYTES)))) is None
    data = picture("JPEG")
    few, many = (b"\xff\xe5\x00\x02" * count for count in (9, MOST_BYTES // 4))
    assert short_header(data[:2] + few + data[2:]) is not None
    assert short_header(data[:2] + many + data[2:]) is None


def test_metadata_with_many_tags_are_not_short() -> None:
    exif = b"Exif\0\0MM\0*\0\0\0\x08" + bytes(MOST_EXIF_BYTES)
    assert short_header(picture("JPEG", exif=exif)) is None
    assert short_header(png_with(chunk(b"eXIf", exif[6:]))) is None
    assert short_header(png_with(chunk(b"eXIf", exif[6:1000]))) is not None


def test_metadata_that_inflate_are_not_short() -> None:
    bomb = zlib.compress(bytes(1 << 20), 9)
    assert short_header(png_with(chunk(b"zTXt", b"a\0\0" + bomb))) is None
    assert short_header(png_with(chunk(b"iTXt", b"a\0\1\0\0\0" + bomb))) is None
    profile = chunk(b"iCCP", b"a\0\0" + bomb)
    assert short_header(png_with(profile)) is not None
    assert short_header(png_with(profile, profile)) is None


@pytest.mark.parametrize(
    "marker", [*range(0xC0), 0xC8, *range(0xD0, 0xDA), *range(0xF0, 0xFE)]
)
def test_markers_that_pillow_reads_otherwise_are_for_pillow(marker: int) -> None:
    data = picture("JPEG")
    segment = bytes((0xFF, marker, 0, 6)) + bytes(4)
    assert short_header(data[:2] + segment + data[2:]) is None


def test_no_two_images_are_taken_for_one() -> None:
    """Behind a marker without a length, other parsers would find other segments."""
    start = bytes.fromhex("ffd8 ffd0 0006 ffe5 0010 ffda0002") + bytes(10)
    assert short_header(start + picture("JPEG")[2:]) is None
