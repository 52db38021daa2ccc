"""Media of a request, fetched and checked but not yet decoded.

vLLM makes a connector for each request that has media. This one reads an image's header
and puts decoding off (``lazy_image``), and fetches URLs through ``remote_media``. Videos
are decoded by vLLM within limits (``video``); local files, audio and embeddings are loaded
as vLLM does.

vLLM names relied on: multimodal.media.MEDIA_CONNECTOR_REGISTRY;
multimodal.media.connector.MediaConnector (load_from_url, load_from_url_async,
_load_data_url, _load_file_url, media_io_kwargs), global_thread_pool;
multimodal.media.image.ImageMediaIO (its arguments and their check);
multimodal.media.video.VideoMediaIO;
envs.VLLM_IMAGE_FETCH_TIMEOUT.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import pybase64
import vllm.envs as envs
from PIL import Image
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector, MediaWithBytes
from vllm.multimodal.media.base import MediaIO
from vllm.multimodal.media.connector import global_thread_pool
from vllm.multimodal.media.image import ImageMediaIO
from vllm.multimodal.media.video import VideoMediaIO

from frontend.admission import let_others_begin
from frontend.loop_turn import turn
from frontend.media.lazy_image import ImageOptions, load_lazily
from frontend.media.remote_media import RemoteMedia
from frontend.media.short_header import short_header
from frontend.media.url_cache import UrlCache
from frontend.media.url_policy import UrlPolicy
from frontend.media.video import load_video, load_video_in_place
from frontend.receipt import current_receipt

M = TypeVar("M")

CONNECTOR = "foveal"
"""Its name in vLLM's registry; VLLM_MEDIA_CONNECTOR chooses one."""

AT_ONCE = 1 << 20
"""Characters of a data URL that is read on the event loop. Its base64 and header take half
a millisecond; to have a thread do it costs about as much again."""


def register_connector(
    remote: RemoteMedia, policy: UrlPolicy, *, keep_pictures: bool = False
) -> None:
    """Let vLLM find this connector by name; all its instances share ``remote``.

    ``keep_pictures``: note the pictures of each request in its receipt.
    """
    make: Any = partial(
        LazyMediaConnector, remote=remote, policy=policy, keep_pictures=keep_pictures
    )
    MEDIA_CONNECTOR_REGISTRY.register(CONNECTOR)(make)


class LazyImageIO(ImageMediaIO):
    """vLLM's way to load images, except that they are not decoded."""

    def __init__(self, image_mode: str | None = "RGB", **kwargs: Any) -> None:
        super().__init__(image_mode, **kwargs)
        if image_mode is not None and not isinstance(image_mode, str):
            raise VLLMValidationError("image_mode must be a string or null")
        self.options = ImageOptions(image_mode, self.rgba_background_color)

    def load_bytes(self, data: bytes) -> MediaWithBytes[Image.Image]:  # type: ignore[override]
        return load_lazily(data, self.options)


class LazyMediaConnector(MediaConnector):
    """vLLM's connector with lazy images and a fetcher of ours."""

    def __init__(
        self,
        *args: Any,
        remote: RemoteMedia,
        policy: UrlPolicy,
        keep_pictures: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._remote = remote
        self._policy = policy
        self._keep_pictures = keep_pictures

    def fetch_image(self, image_url: str, *, image_mode: str | None = "RGB") -> Image.Image:
        return self.load_from_url(
            image_url, self._image_io(image_mode), fetch_timeout=envs.VLLM_IMAGE_FETCH_TIMEOUT
        )

    async def fetch_image_async(
        self, image_url: str, *, image_mode: str | None = "RGB"
    ) -> Image.Image:
        image = await self.load_from_url_async(
            image_url, self._image_io(image_mode), fetch_timeout=envs.VLLM_IMAGE_FETCH_TIMEOUT
        )
        receipt = current_receipt.get() if self._keep_pictures else None
        if receipt is not None and isinstance(image, MediaWithBytes):
            receipt.pictures.append(image.original_bytes)
        return image

    def load_from_url(
        self, url: str, media_io: MediaIO[M], *, fetch_timeout: int | None = None
    ) -> M:
        if _is_here(url):
            return super().load_from_url(url, media_io, fetch_timeout=fetch_timeout)

        async def fetch() -> bytes:
            # In a loop of its own: what is shared belongs to the server's.
            remote = RemoteMedia(self._policy, UrlCache(0))
            try:
                return await remote.fetch(
                    url, timeout=fetch_timeout, max_bytes=media_io.get_max_bytes()
                )
            finally:
                await remote.close()

        data = global_thread_pool.submit(asyncio.run, fetch()).result()
        return _decoder(media_io)(data)

    async def load_from_url_async(
        self, url: str, media_io: MediaIO[M], *, fetch_timeout: int | None = None
    ) -> M:
        if _is_here(url):
            if not isinstance(media_io, LazyImageIO):
                let_others_begin()  # as many are decoded at a time as vLLM has threads
            elif url[0] in "dD" and len(url) <= AT_ONCE and turn.has_time():
                turn.spend()
                data = _bytes_of(url)
                if short_header(data) is not None and turn.has_time():
                    return cast(M, media_io.load_bytes(data))
                return cast(M, await _in_thread(media_io.load_bytes, data))
            return await super().load_from_url_async(
                url, media_io, fetch_timeout=fetch_timeout
            )
        data = await self._remote.fetch(
            url, timeout=fetch_timeout, max_bytes=media_io.get_max_bytes()
        )
        return await _in_thread(_decoder(media_io), data)

    def _load_data_url(self, url: str, media_io: MediaIO[M]) -> M:
        if isinstance(media_io, LazyImageIO):
            return cast(M, media_io.load_bytes(_bytes_of(url)))
        media_type, data = _parts_of(url)
        if isinstance(media_io, VideoMediaIO):
            return cast(M, load_video_in_place(media_type, data, media_io))
        return media_io.load_base64(media_type, data)

    def _load_file_url(self, url_spec: Any, media_io: MediaIO[M]) -> M:
        try:
            return super()._load_file_url(url_spec, media_io)
        except (RuntimeError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise VLLMValidationError(f"Cannot load a local file: {reason}") from error

    def _image_io(self, image_mode: str | None) -> LazyImageIO:
        return LazyImageIO(
            **({"image_mode": image_mode} | self.media_io_kwargs.get("image", {}))
        )


def _parts_of(data_url: str) -> tuple[str, str]:
    """The media type and the base64 of a data URL, read as vLLM does, with one copy less.

    Raises:
        VLLMValidationError: it is no such URL.
    """
    comma = data_url.find(",")
    if comma < 0:
        text = f"Invalid data URL {data_url[:32]!r}: missing ',' separator."
        raise VLLMValidationError(text)
    kind, _, encoding = data_url[5:comma].rpartition(";")
    if encoding != "base64":
        raise VLLMValidationError("Only base64 data URLs are supported for now.")
    return kind.partition(";")[0], data_url[comma + 1 :]


def _bytes_of(data_url: str) -> bytes:
    """Raises: VLLMValidationError: it is no data URL, or its base64 is broken."""
    _, data = _parts_of(data_url)
    try:
        return pybase64.b64decode(data, validate=True)
    except ValueError as error:
        raise VLLMValidationError(f"Invalid base64 in data URL: {error}") from error


async def _in_thread(load: Callable[[bytes], M], data: bytes) -> M:
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(global_thread_pool, load, data)


def _decoder(media_io: MediaIO[M]) -> Callable[[bytes], M]:
    if isinstance(media_io, VideoMediaIO):
        return cast(Callable[[bytes], M], partial(load_video, media_io=media_io))
    return media_io.load_bytes


def _is_here(url: str) -> bool:
    """Whether the media are in the request itself or on this host's disk."""
    return url[:5].lower() in ("data:", "file:")
