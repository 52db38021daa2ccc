"""Which images say what they are within their first few bytes.

To read such a header takes a fraction of a millisecond, and some at most. Others can be made
to take much longer: by a hundred thousand segments or tags, or by metadata that inflate to
many times their size.
"""

from __future__ import annotations

import struct

MOST_BYTES = 8192
"""Before the pixels: a colour profile, what a camera says, but no thumbnail."""
MOST_EXIF_BYTES = 2048
"""Of its metadata in one segment or chunk: Pillow warns of each tag that is none."""
_SEGMENTS = frozenset((*range(0xC0, 0xD0), *range(0xDA, 0xDE), *range(0xE0, 0xF0), 0xFE)) - {
    0xC8
}
"""Markers of a JPEG that Pillow and this take for the same: a length follows."""
_APP1, _START_OF_SCAN = 0xE1, 0xDA
_CHUNKS = frozenset((b"IHDR", b"PLTE", b"tRNS", b"gAMA", b"cHRM", b"sRGB", b"iCCP", b"sBIT",
                     b"pHYs", b"tIME", b"tEXt", b"eXIf", b"bKGD", b"cICP"))
"""Of a PNG that take no time. A colour profile is compressed, but there is only one."""


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
    while position + 4 <= len(data):
        mark, kind, length = struct.unpack_from(">BBH", data, position)
        if mark != 0xFF or kind not in _SEGMENTS or length < 2:
            return 0
        if kind == _APP1 and length > MOST_EXIF_BYTES:
            return 0
        position += 2 + length
        if position > min(len(data), MOST_BYTES):
            return 0
        if kind == _START_OF_SCAN:  # behind it the pixels begin
            return position
    return 0


def _end_of_png_header(data: bytes) -> int:
    """0 if that is far away."""
    position, profiles = 8, 0
    while position + 8 <= min(len(data), MOST_BYTES):
        length, kind = struct.unpack_from(">I4s", data, position)
        if kind == b"IDAT":
            return position + 8
        profiles += kind == b"iCCP"
        if kind not in _CHUNKS or profiles > 1:
            return 0
        if kind == b"eXIf" and length > MOST_EXIF_BYTES:
            return 0
        position += length + 12
    return 0
