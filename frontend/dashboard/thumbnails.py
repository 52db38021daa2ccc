"""Small copies of pictures, made when somebody looks at them."""

from __future__ import annotations

import io

from PIL import Image

SIDE = 96
"""Pixels of the longer side."""

MOST_PIXELS = 64 << 20
"""Larger pictures have no thumbnail."""


def thumbnail(encoded: bytes) -> bytes | None:
    """A small JPEG of a picture; None where it cannot be decoded."""
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            if image.width * image.height > MOST_PIXELS:
                return None
            image.draft("RGB", (2 * SIDE, 2 * SIDE))  # JPEGs are decoded small
            image.thumbnail((SIDE, SIDE))
            small = io.BytesIO()
            image.convert("RGB").save(small, "JPEG", quality=80)
            return small.getvalue()
    except Exception:  # decoders raise whatever they stumble over
        return None
