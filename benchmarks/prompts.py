"""Pictures and request bodies, made before anything is timed."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image


def jpeg(width: int, height: int, seed: int) -> bytes:
    """A smooth picture of its own for each seed."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)
    picture = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    out = io.BytesIO()
    picture.save(out, "JPEG", quality=90)
    return out.getvalue()


def picture_request(model: str, picture: bytes, question: str, max_tokens: int) -> bytes:
    """A chat request: the picture first, then the question."""
    return pictures_request(model, [picture], question, max_tokens)


def pictures_request(
    model: str, pictures: Sequence[bytes], question: str, max_tokens: int
) -> bytes:
    """A chat request: the pictures first, then the question."""
    content: list[dict[str, Any]] = []
    for picture in pictures:
        url = "data:image/jpeg;base64," + base64.b64encode(picture).decode()
        content.append({"type": "image_url", "image_url": {"url": url}})
    content.append({"type": "text", "text": question})
    return _request(model, content, max_tokens)


def text_request(model: str, text: str, max_tokens: int) -> bytes:
    """A chat request without a picture."""
    return _request(model, text, max_tokens)


def _request(model: str, content: Any, max_tokens: int) -> bytes:
    return json.dumps({
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }).encode()
