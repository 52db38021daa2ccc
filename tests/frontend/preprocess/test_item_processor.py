"""What a preprocess process makes of media, before any model's processor sees them."""

from __future__ import annotations

import io
from typing import Any, cast

import pytest
from PIL import Image
from vllm.multimodal.media import MediaWithBytes
from vllm.multimodal.media.image import ImageMediaIO

from frontend.media.lazy_image import ImageHeader, ImageOptions, LazyImage
from frontend.preprocess.encoded_media import encoded_media
from frontend.preprocess.item_processor import ItemProcessor, Unreadable
from frontend.preprocess.messages import Media


class Took(Exception):
    """Raised by the processor behind, with the image that got there."""


class Behind:
    """Where vLLM's processor stands."""

    @property
    def info(self) -> Any:
        return self

    def parse_mm_data(self, data: dict[str, list[Any]], *, validate: bool) -> Any:
        raise Took(data["image"][0].media)


def process(media: Media) -> Image.Image:
    """The decoded image that is given to the model's processor."""
    with pytest.raises(Took) as took:
        ItemProcessor(cast("Any", Behind())).process("image", media, {})
    image: Image.Image = took.value.args[0]
    return image


def encoded(mode: str, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.new(mode, (8, 6)).save(out, kind)
    return out.getvalue()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
@pytest.mark.parametrize("image_mode", [None, "RGB"])
def test_an_image_is_what_its_header_said(mode: str, image_mode: str | None) -> None:
    loaded = ImageMediaIO(image_mode).load_bytes(encoded(mode))
    media = encoded_media(loaded)
    assert media is not None
    assert process(media).mode == (image_mode or loaded.media.mode)


@pytest.mark.parametrize("claimed", ["L", "P", "CMYK", "RGBA"])
@pytest.mark.parametrize("image_mode", [None, "RGB"])
def test_an_image_whose_header_lies_is_refused_as_in_the_frontend(
    claimed: str, image_mode: str | None
) -> None:
    """It was hashed as what it claims to be; its pixels would answer for another's."""
    data = encoded("RGB")
    options = ImageOptions(image_mode)
    lazy = LazyImage(data, options, ImageHeader("PNG", claimed, (8, 6), None))
    conversion = {"image_mode": image_mode} if lazy.is_converted else None
    media = encoded_media(MediaWithBytes(lazy, data, conversion))
    assert media is not None
    with pytest.raises(Unreadable, match="header is not true"):
        ItemProcessor(cast("Any", Behind())).process("image", media, {})


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_the_copy_that_vllm_makes_has_the_pixels_without_copying_them(kind: str) -> None:
    data = encoded("RGB", kind)
    image = process(Media(data, None, (255, 255, 255), "RGB"))
    pixels = image.im
    assert image.copy().im is pixels
    assert image.copy().tobytes() == ImageMediaIO("RGB").load_bytes(data).media.tobytes()


@pytest.mark.parametrize("data", [b"", b"text", encoded("RGB")[:45], b"\x89PNG\r\n\x1a\n"])
def test_what_cannot_be_decoded_is_unreadable(data: bytes) -> None:
    media = Media(data, None, (255, 255, 255), "RGB")
    with pytest.raises(Unreadable, match="Failed to load image"):
        ItemProcessor(cast("Any", Behind())).process("image", media, {})
