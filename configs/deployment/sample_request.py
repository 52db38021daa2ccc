"""A chat request with a small picture, complete in itself: it needs no network."""

import base64
import io
import json
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

SIZE = (448, 336)


def landscape() -> bytes:
    """A PNG of a sun over two hills."""
    picture = Image.new("RGB", SIZE, (150, 200, 240))
    draw = ImageDraw.Draw(picture)
    draw.ellipse((320, 40, 400, 120), fill=(250, 210, 70))
    draw.ellipse((-120, 180, 300, 560), fill=(70, 140, 70))
    draw.ellipse((160, 220, 620, 640), fill=(50, 110, 60))
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return file.getvalue()


def image_request(model: str) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(landscape()).decode()
    return {
        "model": model,
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": url}},
                    {"type": "text", "text": "What is in this picture?"},
                ],
            }
        ],
        "max_tokens": 32,
        "temperature": 0,
    }


def text_request(model: str) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "max_tokens": 32,
    }


def write_image_request(path: Path, model: str) -> None:
    path.write_text(json.dumps(image_request(model), indent=1) + "\n")
