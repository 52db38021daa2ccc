"""Images of a request as they came, to be decoded elsewhere.

vLLM names relied on: multimodal.media.MediaWithBytes, whose io_config says how its image
was converted (ImageMediaIO.load_bytes sets image_mode and rgba_background_color).
"""

from __future__ import annotations

from typing import Any

from PIL import Image
from vllm.multimodal.media import MediaWithBytes

from frontend.preprocess.messages import Media

_WHITE = (255, 255, 255)


def encoded_media(item: Any) -> Media | None:
    """The encoded image that ``item`` was made from; None for anything else."""
    if type(item) is not MediaWithBytes or not isinstance(item.media, Image.Image):
        return None
    conversion = item.io_config or {}
    return Media(
        data=item.original_bytes,
        image_mode=conversion.get("image_mode"),
        background=tuple(conversion.get("rgba_background_color", _WHITE)),
        mode=item.media.mode,
    )
