"""An encoded image that is decoded when its pixels are first asked for.

vLLM decodes every image before it looks into its processor cache. Here the header alone
is read: it is enough to refuse what is no image or too large, and to say everything that
vLLM's hash says about the image. Decoding is vLLM's own, later.

``LazyImage`` is a PIL image, so that processors and vLLM's hasher take it as it is. What
only decoding can tell (pixels, palette, metadata) decodes on access. To decode elsewhere,
send ``data`` and ``options`` there and call ``decode``.

vLLM names relied on: multimodal.media.image.ImageMediaIO (load_bytes: what is converted,
and what io_config then says), multimodal.image.open_image, multimodal.media.MediaWithBytes,
multimodal.hasher (hashes original_bytes and io_config of a MediaWithBytes),
envs.VLLM_MAX_IMAGE_PIXELS.
"""

from __future__ import annotations

import struct
from io import BytesIO
from typing import Any

import msgspec
import vllm.envs as envs
from PIL import ExifTags, Image, UnidentifiedImageError
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.image import open_image
from vllm.multimodal.media import MediaWithBytes
from vllm.multimodal.media.image import ImageMediaIO

from frontend.media.short_header import short_header

LAZY_FORMATS = frozenset({"JPEG", "MPO", "PNG", "WEBP"})
"""Formats whose header states the mode that decoding yields; others are decoded at once."""

_MOST_CHUNKS = 4096
"""Of a PNG, looked through for metadata behind its pixels: encoders write one for 8 KiB or
more."""

_known_headers: dict[bytes, ImageHeader] = {}
"""Of JPEG and PNG, by what comes before the pixels: Pillow reads no further."""
_MOST_KNOWN = 1024
"""Of up to 8 KiB each."""

_ONLY_DECODING_TELLS = frozenset({"info", "palette", "_size"})


class ImageUnreadable(VLLMValidationError):
    """What was sent as an image cannot be read as one; the text says why."""


class ImageOptions(msgspec.Struct, frozen=True):
    """How an image is to be decoded: what ``media_io_kwargs`` says about images."""

    image_mode: str | None = "RGB"
    """PIL mode to convert to; None keeps the image's own."""
    rgba_background_color: tuple[int, int, int] = (255, 255, 255)
    """What shows through where the image is transparent, 0 to 255 each."""


class ImageHeader(msgspec.Struct, frozen=True):
    """What an image's header says."""

    format: str
    """PIL's name of the file format."""
    mode: str
    """PIL mode before any conversion."""
    size: tuple[int, int]
    """Width and height as stored, before the EXIF orientation is applied, pixels."""
    orientation: int | None
    """EXIF orientation, 1 to 8; None where the header states none."""


def read_header(data: bytes) -> ImageHeader:
    """Read what ``data`` says about itself, without decoding.

    Raises:
        ImageUnreadable: not an image of a format that vLLM accepts, or more pixels than
            VLLM_MAX_IMAGE_PIXELS.
    """
    key = short_header(data)
    try:
        if key is not None and (known := _known_headers.get(key)) is not None:
            _checked(known.size)
            return known
        with open_image(BytesIO(data)) as image:
            # PNG's own getexif would decode, in search of metadata behind the pixels.
            header = ImageHeader(
                image.format or "", image.mode, _checked(image.size), _orientation(image)
            )
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError,
            SyntaxError, struct.error) as error:
        raise ImageUnreadable(f"Failed to load image: {error}") from error
    if key is not None and header.format in ("JPEG", "PNG"):
        if len(_known_headers) >= _MOST_KNOWN:
            _known_headers.clear()
        _known_headers[key] = header
    return header


def decode(data: bytes, options: ImageOptions) -> Image.Image:
    """Decode as vLLM does: oriented, and converted as ``options`` say.

    Raises:
        ImageUnreadable: the data is damaged, or cannot be converted.
    """
    return _load_at_once(data, options).media


def load_lazily(data: bytes, options: ImageOptions) -> MediaWithBytes[Image.Image]:
    """What vLLM's ``ImageMediaIO.load_bytes`` returns, with the decoding put off.

    vLLM's hash of it is the hash of vLLM's own.

    Raises:
        ImageUnreadable: see ``read_header``; for formats that are not lazy, ``decode``.
    """
    header = read_header(data)
    if header.format not in LAZY_FORMATS:
        return _load_at_once(data, options)
    image = LazyImage(data, options, header)
    return MediaWithBytes(
        image, data, msgspec.structs.asdict(options) if image.is_converted else None
    )


class LazyImage(Image.Image):
    """A PIL image whose pixels are decoded on first use.

    Not safe to use from several threads at once, as no PIL image is.
    """

    def __init__(self, data: bytes, options: ImageOptions, header: ImageHeader) -> None:
        super().__init__()
        self.data = data
        self.options = options
        self.header = header
        self._mode = options.image_mode or header.mode
        self._failure: ImageUnreadable | None = None
        self._size_stated: tuple[int, int] | None = None
        self._size_was_looked_for = False
        self.readonly = 1  # Pillow clears it when the pixels are about to be changed
        for name in _ONLY_DECODING_TELLS:
            delattr(self, name)  # __getattr__ finds out

    @property
    def is_converted(self) -> bool:
        """Whether decoding converts it, so that ``options`` enter vLLM's hash."""
        return self.options.image_mode not in (None, self.header.mode)

    @property
    def says_its_size(self) -> bool:
        """Whether to ask for its size does not decode it."""
        return self.decoded or self._stated_size() is not None

    def _stated_size(self) -> tuple[int, int] | None:
        if not self._size_was_looked_for:
            self._size_stated = _oriented_size(self.data, self.header)
            self._size_was_looked_for = True
        return self._size_stated

    @property
    def decoded(self) -> bool:
        """Whether the pixels are there."""
        return self._im is not None

    def decode(self) -> Image.Image:
        """A new image, decoded as vLLM does; this one stays as it is.

        Raises:
            ImageUnreadable: the data is damaged, or cannot be converted.
        """
        return decode(self.data, self.options)

    def load(self) -> Any:
        """Decode, if that has not been done: every access to pixels comes through here.

        Raises:
            ImageUnreadable: as ``decode``.
        """
        if self._failure is not None:
            raise self._failure
        if not self.decoded:
            try:
                media = _load_at_once(self.data, self.options)
                was_converted = media.io_config is not None
                if was_converted != self.is_converted or media.media.mode != self._mode:
                    # It was hashed, and perhaps found, as what it is not.
                    raise ImageUnreadable("Failed to load image: its header is not true")
            except ImageUnreadable as failure:
                # vLLM ignores the first error (of its EXIF handling) and asks again.
                self._failure = failure
                raise
            image = media.media
            image.load()
            self.im, self.palette, self.info = image.im, image.palette, image.info
            self._mode, self._size = image.mode, image.size
            self._exif = image._exif
        return super().load()

    def copy(self) -> Image.Image:
        """A copy that is a plain image.

        vLLM makes one of every image right before processing it, and looks at the image
        itself no more. So the copy gets these pixels; who asks here again has them decoded
        again.
        """
        self.load()
        if not self.readonly:
            return super().copy()
        image = self._new(self.im)
        self._im = None
        return image

    def getexif(self) -> Image.Exif:
        # vLLM's hasher asks for an ImageID that is a UUID object. Images made in memory
        # can have one, files cannot: no reason to decode.
        return super().getexif() if self.decoded else Image.Exif()

    def __getattr__(self, name: str) -> Any:
        if name not in _ONLY_DECODING_TELLS or "header" not in self.__dict__:
            raise AttributeError(name)
        if name == "_size" and (size := self._stated_size()) is not None:
            return size
        self.load()
        return self.__dict__[name]

    def __reduce__(self) -> tuple[Any, ...]:
        return LazyImage, (self.data, self.options, self.header)

    def __repr__(self) -> str:
        width, height = self.header.size
        return f"<image {self.header.format} {self.header.mode} {width}x{height}>"


def _load_at_once(data: bytes, options: ImageOptions) -> MediaWithBytes[Image.Image]:
    try:
        return ImageMediaIO(**msgspec.structs.asdict(options)).load_bytes(data)
    except MemoryError:
        raise
    except Exception as error:  # Pillow's decoders raise whatever they stumble over
        text = str(error).removeprefix("Failed to load image: ")
        raise ImageUnreadable(f"Failed to load image: {text}") from error


def _checked(size: tuple[int, int]) -> tuple[int, int]:
    width, height = size
    limit = envs.VLLM_MAX_IMAGE_PIXELS
    if 0 < limit < width * height:
        raise ValueError(
            f"Image dimensions {width}x{height} ({width * height} pixels) exceed the "
            f"maximum of {limit} pixels. Set VLLM_MAX_IMAGE_PIXELS to increase this limit."
        )
    return width, height


def _orientation(image: Image.Image) -> int | None:
    try:
        orientation = Image.Image.getexif(image).get(ExifTags.Base.Orientation)
    except Exception:  # as tolerant of broken EXIF as vLLM
        return None
    return orientation if isinstance(orientation, int) else None


def _oriented_size(data: bytes, header: ImageHeader) -> tuple[int, int] | None:
    """Width and height once decoded, in pixels; None where only decoding tells."""
    if header.format == "PNG" and _has_late_metadata(data):
        return None
    # 5 to 8 turn the image, unless its EXIF turns out to be broken.
    return header.size if (header.orientation or 1) <= 4 else None


def _has_late_metadata(png: bytes) -> bool:
    """Whether a PNG has metadata, perhaps an orientation, behind its pixels.

    Of more chunks than are looked at only decoding tells.
    """
    position, pixels_seen = 8, False
    for _ in range(_MOST_CHUNKS):
        if position + 8 > len(png):
            return False
        length, kind = struct.unpack_from(">I4s", png, position)
        if pixels_seen and kind in (b"eXIf", b"iTXt", b"tEXt", b"zTXt"):
            return True
        pixels_seen |= kind == b"IDAT"
        position += length + 12
    return True
