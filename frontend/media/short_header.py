"""Which images say what they are within their first few bytes.

To read such a header takes a fraction of a millisecond whatever the image. Others can be
made to take much longer: by a hundred thousand segments, or by metadata that inflate to
many times their size.
"""

from __future__ import annotations

import struct

MOST_PARTS = 64
"""Segments of a JPEG before its pixels. Cameras write ten or twenty."""
PNG_BYTES = 4096
"""Of a PNG before its pixels: a colour profile, some text. What is compressed there can
inflate to 1 MiB for each KiB or so."""


def short_header(data: bytes) -> bytes | None:
    """What comes before the pixels of a JPEG or PNG whose header is read in no time.

    None for anything else.
    """
    end = 0
    if data.startswith(b"\xff\xd8"):
        end = _end_of_jpeg_header(data)
    elif data.startswith(b"\x89PNG\r\n\x1a\n"):
        end = _end_of_png_header(data)
    return data[:end] or None


def _end_of_jpeg_header(data: bytes) -> int:
    """0 if that is far away."""
    position = 2
    for _ in range(MOST_PARTS):
        head = data[position : position + 4]
        if len(head) < 4 or head[0] != 0xFF or head[1] == 0xFF:
            return 0  # damaged, or padded: for a decoder to say
        position += 2 + int.from_bytes(head[2:], "big")
        if head[1] == 0xDA:  # behind it the pixels begin
            return position
    return 0


def _end_of_png_header(data: bytes) -> int:
    """0 if that is far away."""
    position = 8
    while position + 8 <= min(len(data), PNG_BYTES):
        length, kind = struct.unpack_from(">I4s", data, position)
        if kind == b"IDAT":
            return position + 8
        position += length + 12
    return 0
