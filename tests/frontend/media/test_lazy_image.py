from __future__ import annotations

import io
import pickle
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ExifTags, Image
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.media import MediaWithBytes
from vllm.multimodal.media.image import ImageMediaIO
from vllm.multimodal.parse import MultiModalDataParser

from frontend.media import lazy_image
from frontend.media.lazy_image import (
    LAZY_FORMATS,
    ImageHeader,
    ImageOptions,
    ImageUnreadable,
    LazyImage,
    decode,
    load_lazily,
    read_header,
)
from frontend.media.short_header import MOST_BYTES

# Pillow's, about the conversion of a palette to L.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Palette images with Transparency:UserWarning"
)

MODES = {
    "JPEG": ["L", "RGB", "CMYK"],
    "MPO": ["RGB"],
    "PNG": ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"],
    "WEBP": ["RGB", "RGBA"],
    "GIF": ["L", "P"],
    "BMP": ["1", "L", "P", "RGB"],
    "TIFF": ["1", "L", "RGB", "RGBA", "CMYK", "F"],
}


def picture(mode: str, width: int, height: int, seed: int) -> Image.Image:
    """Noise, in any mode."""
    rng = np.random.default_rng(seed)
    if mode == "I;16":
        return Image.fromarray(rng.integers(0, 1 << 16, (height, width), np.uint16))
    return Image.fromarray(
        rng.integers(0, 256, (height, width, 4), np.uint8), "RGBA"
    ).convert(mode)


def exif_with(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    exif[ExifTags.Base.ImageID] = "5f1c7bd2-4d5b-4a62-9f6f-000000000000"
    return exif.tobytes()


def with_late_chunk(png: bytes, kind: bytes, content: bytes) -> bytes:
    """Put a chunk behind the pixels, before the last chunk (12 bytes)."""
    crc = zlib.crc32(kind + content).to_bytes(4, "big")
    return png[:-12] + len(content).to_bytes(4, "big") + kind + content + crc + png[-12:]


@st.composite
def encoded_images(draw: st.DrawFn) -> tuple[str, bytes]:
    """A file format and an image in it."""
    kind = draw(st.sampled_from(sorted(MODES)))
    mode = draw(st.sampled_from(MODES[kind]))
    image = picture(
        mode, draw(st.integers(1, 40)), draw(st.integers(1, 40)), draw(st.integers(0, 99))
    )
    extra: dict[str, Any] = {}
    if kind != "BMP" and kind != "GIF":
        orientation = draw(st.sampled_from([None, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]))
        if orientation is not None:
            extra["exif"] = exif_with(orientation)
    if kind in ("PNG", "GIF") and mode in ("P", "L", "RGB") and draw(st.booleans()):
        extra["transparency"] = (1, 2, 3) if mode == "RGB" else 3
    moves = kind in ("GIF", "PNG", "WEBP") and "transparency" not in extra
    if kind == "MPO" or (moves and draw(st.booleans())):
        extra |= {"save_all": True, "append_images": [picture(mode, *image.size, 7)]}
    out = io.BytesIO()
    image.save(out, kind, **extra)
    data = out.getvalue()
    if kind == "PNG" and draw(st.booleans()):
        orientation = draw(st.integers(0, 9))
        data = with_late_chunk(data, b"eXIf", exif_with(orientation)[6:])
    return kind, data


all_options = st.builds(
    ImageOptions,
    image_mode=st.sampled_from(["RGB", "RGBA", "L", None]),
    rgba_background_color=st.sampled_from([(255, 255, 255), (0, 0, 0), (10, 20, 30)]),
)


def theirs(data: bytes, options: ImageOptions) -> MediaWithBytes[Image.Image]:
    return ImageMediaIO(
        options.image_mode, rgba_background_color=options.rgba_background_color
    ).load_bytes(data)


def hash_of(item: object) -> str:
    return MultiModalHasher.hash_kwargs("blake3", model_id="some model", image=item)


def processor_input(item: MediaWithBytes[Image.Image]) -> Image.Image:
    """What vLLM gives the processor for an item that it has not in its cache."""
    parser = MultiModalDataParser()
    parsed = parser.parse_mm_data({"image": [item]})["image"]
    return parser.parse_mm_data({"image": [parsed[0]]})["image"][0]


@settings(max_examples=200)
@given(encoded_images(), all_options)
def test_hash_size_mode_and_pixels_are_vllms(
    encoded: tuple[str, bytes], options: ImageOptions
) -> None:
    _, data = encoded
    ours, expected = load_lazily(data, options), theirs(data, options)
    assert hash_of(ours) == hash_of(expected)
    image = ours.media
    assert isinstance(image, LazyImage) == (read_header(data).format in LAZY_FORMATS)
    assert not isinstance(image, LazyImage) or not image.decoded
    assert image.mode == expected.media.mode
    assert image.size == expected.media.size
    assert image.info.get("transparency") == expected.media.info.get("transparency")
    given_to_theirs, given_to_ours = processor_input(expected), processor_input(ours)
    assert given_to_ours == given_to_theirs
    assert image.tobytes() == expected.media.tobytes()
    assert decode(data, options).tobytes() == expected.media.tobytes()
    assert dict(image.getexif()) == dict(expected.media.getexif())


@given(encoded_images())
def test_options_that_change_pixels_change_the_hash(encoded: tuple[str, bytes]) -> None:
    _, data = encoded
    hashes: dict[str, Image.Image] = {}
    for options in (
        ImageOptions("RGB"), ImageOptions("RGB", (0, 0, 0)), ImageOptions("L"),
        ImageOptions(None),
    ):
        media = load_lazily(data, options)
        image = decode(data, options)
        same = hashes.setdefault(hash_of(media), image)
        assert (same.mode, same.tobytes()) == (image.mode, image.tobytes())


def jpeg(**extra: Any) -> bytes:
    out = io.BytesIO()
    picture("RGB", 60, 20, 1).save(out, "JPEG", **extra)
    return out.getvalue()


def test_the_size_is_known_without_decoding() -> None:
    image = load_lazily(jpeg(), ImageOptions()).media
    assert (image.size, image.width, image.height, image.mode) == ((60, 20), 60, 20, "RGB")
    assert not image.decoded


def test_a_turned_image_has_the_size_that_it_has_once_turned() -> None:
    assert load_lazily(jpeg(exif=exif_with(6)), ImageOptions()).media.size == (20, 60)


def test_an_orientation_behind_the_pixels_of_a_png_counts() -> None:
    out = io.BytesIO()
    picture("RGB", 60, 20, 1).save(out, "PNG")
    data = with_late_chunk(out.getvalue(), b"eXIf", exif_with(6)[6:])
    assert theirs(data, ImageOptions()).media.size == (20, 60)
    assert load_lazily(data, ImageOptions()).media.size == (20, 60)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What has been decoded."""
    decoded = []

    class Noting(ImageMediaIO):
        def load_bytes(self, data: bytes) -> MediaWithBytes[Image.Image]:
            decoded.append(data)
            return super().load_bytes(data)

    monkeypatch.setattr(lazy_image, "ImageMediaIO", Noting)
    return decoded


def test_pixels_are_decoded_once(decoded: list[bytes]) -> None:
    image = load_lazily(jpeg(), ImageOptions()).media
    image.tobytes()
    np.asarray(image)
    image.convert("L")
    assert len(decoded) == 1


def test_a_copy_takes_the_pixels_along() -> None:
    image, pixels = load_lazily(jpeg(), ImageOptions()).media, decode(jpeg(), ImageOptions())
    copy = image.copy()
    assert type(copy) is Image.Image and not image.decoded
    copy.putpixel((0, 0), (1, 2, 3))
    assert image.tobytes() == pixels.tobytes()


def test_a_copy_has_what_was_changed_and_leaves_it() -> None:
    image = load_lazily(jpeg(), ImageOptions()).media
    image.putpixel((0, 0), (1, 2, 3))
    for copy in (image.copy(), image):
        assert copy.getpixel((0, 0)) == (1, 2, 3)


def test_it_survives_pickling_without_being_decoded() -> None:
    image = load_lazily(jpeg(), ImageOptions("L")).media
    copy = pickle.loads(pickle.dumps(image))
    assert isinstance(copy, LazyImage)
    assert not image.decoded and not copy.decoded
    assert copy == image


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_truncated_image_is_refused_every_time_and_decoded_once(
    kind: str, decoded: list[bytes]
) -> None:
    out = io.BytesIO()
    picture("RGB", 200, 200, 1).save(out, kind)
    media = load_lazily(out.getvalue()[:-3000], ImageOptions())
    for _ in range(2):
        with pytest.raises(ImageUnreadable, match="Failed to load image"):
            media.media.load()
    with pytest.raises(ImageUnreadable):
        np.asarray(processor_input(media))
    assert len(decoded) == 1


@pytest.mark.parametrize(
    "data", [b"", b"text", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"\xff\xd8\xff",
             b"\x89PNG\r\n\x1a\n" + b"\0" * 40, b"RIFF\x00\x00\x00\x00WEBPVP8 "],
)
def test_what_is_no_image_is_refused_at_once(data: bytes) -> None:
    with pytest.raises(ImageUnreadable, match="Failed to load image"):
        load_lazily(data, ImageOptions())


def test_an_image_with_too_many_pixels_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_MAX_IMAGE_PIXELS", "1199")
    with pytest.raises(ImageUnreadable, match="60x20"):
        load_lazily(jpeg(), ImageOptions())


@pytest.mark.parametrize("image_mode", [None, "RGB"])
def test_an_image_that_is_not_what_its_header_said_is_refused(image_mode: str | None) -> None:
    header = ImageHeader("JPEG", "L", (60, 20), None)
    with pytest.raises(ImageUnreadable, match="header"):
        LazyImage(jpeg(), ImageOptions(image_mode), header).load()


def test_a_mode_that_does_not_exist_is_refused() -> None:
    media = load_lazily(jpeg(), ImageOptions("FOO"))
    with pytest.raises(ImageUnreadable):
        media.media.load()


def test_a_header_that_is_known_is_not_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (picture_of(seed) for seed in (1, 2))
    header = read_header(first)

    def refuse(_: object) -> None:
        raise AssertionError("it is opened")

    monkeypatch.setattr(lazy_image, "open_image", refuse)
    assert read_header(second) == header
    monkeypatch.setenv("VLLM_MAX_IMAGE_PIXELS", str(8 * 6 - 1))
    with pytest.raises(ImageUnreadable, match="exceed"):
        read_header(second)


def test_headers_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy_image, "_MOST_KNOWN", 3)
    for width in range(1, 20):
        read_header(picture_of(1, width))
    assert len(lazy_image._known_headers) <= 3
    large = io.BytesIO()
    Image.new("RGB", (3, 2)).save(large, "JPEG", icc_profile=bytes(20_000))
    read_header(large.getvalue())
    assert all(len(key) <= MOST_BYTES for key in lazy_image._known_headers)


def picture_of(seed: int, width: int = 8) -> bytes:
    """A JPEG; the pixels are others for each seed, the header is not."""
    pixels = np.random.default_rng(seed).integers(0, 256, (6, width, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG")
    return out.getvalue()
