"""Pictures to ask about: photographs that scikit-image ships, and made-up ones."""

from __future__ import annotations

import base64
import io
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import skimage
from PIL import Image

PHOTOGRAPHS = Path(skimage.__file__).parent / "data"

MIME = {"JPEG": "jpeg", "PNG": "png", "WEBP": "webp", "BMP": "bmp", "GIF": "gif"}


@cache
def photograph(name: str) -> Image.Image:
    """A picture of ``skimage.data``, by its file name."""
    with Image.open(PHOTOGRAPHS / name) as image:
        image.load()
        return image


@cache
def pattern(width: int, height: int, seed: int = 0) -> Image.Image:
    """Stripes and noise, different for each seed."""
    random = np.random.default_rng(seed)
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    waves = [
        127 + 90 * np.sin(x * a + y * b + c)
        for a, b, c in random.uniform(0.02, 0.4, size=(3, 3))
    ]
    noise = random.integers(-30, 30, size=(height, width, 3))
    pixels = np.clip(np.stack(waves, axis=-1) + noise, 0, 255)
    return Image.fromarray(pixels.astype(np.uint8), "RGB")


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def data_url(content: bytes, form: str = "PNG") -> str:
    return f"data:image/{MIME[form]};base64,{base64.b64encode(content).decode()}"


def turned(image: Image.Image, orientation: int) -> bytes:
    """A JPEG that EXIF says to turn before it is looked at."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(image, "JPEG", exif=exif)


def animated(*frames: Image.Image) -> bytes:
    """A GIF of several pictures."""
    first, *rest = frames
    return encoded(first, "GIF", save_all=True, append_images=rest, duration=100)
