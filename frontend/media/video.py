"""Videos: decoded by vLLM, within limits, and told apart by all that decoding depends on.

vLLM limits what a video weighs only while it is downloaded, and its frames not at all. Its
hash covers the options of its own modality; a video sent as single pictures is decoded by
the options of images as well, so those are added here.

vLLM names relied on: multimodal.media.video.VideoMediaIO (image_io, load_bytes,
load_base64, and that "video/jpeg" is a list of pictures); multimodal.media.MediaWithBytes
(original_bytes is what a video's hash covers); envs.VLLM_MAX_IMAGE_PIXELS,
VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB.
"""

from __future__ import annotations

from dataclasses import replace
from io import BytesIO
from typing import Any

import cv2
import pybase64
import vllm.envs as envs
from vllm.exceptions import VLLMUnprocessableEntityError, VLLMValidationError
from vllm.multimodal.media.video import VideoMediaIO

PICTURES = "video/jpeg"
MEBIBYTE = 1 << 20


def load_video_in_place(media_type: str, data: str, media_io: VideoMediaIO) -> Any:
    """Decode what a data URL holds; ``data`` is in base64.

    Raises:
        VLLMValidationError: it is no base64, or no video; frames have too many pixels.
        VLLMUnprocessableEntityError: it is larger than a download may be.
    """
    if len(data) * 3 // 4 > envs.VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB * MEBIBYTE:
        raise VLLMUnprocessableEntityError(
            f"A video may have {envs.VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB} MiB at most."
        )
    if media_type.lower() == PICTURES:
        return _load_pictures(data, media_io)
    try:
        encoded = pybase64.b64decode(data, validate=True)
    except ValueError as error:
        raise VLLMValidationError(f"Invalid base64 in data URL: {error}") from error
    return load_video(encoded, media_io)


def load_video(data: bytes, media_io: VideoMediaIO) -> Any:
    """Decode the frames that ``media_io`` asks for.

    Raises:
        VLLMValidationError: this is no video, or its frames have more pixels than
            VLLM_MAX_IMAGE_PIXELS.
    """
    _check_frames(data)
    try:
        return media_io.load_bytes(data)
    except VLLMValidationError:
        raise
    except Exception as error:  # decoders raise whatever they stumble over
        raise VLLMValidationError(f"Failed to load video: {error}") from error


def _check_frames(data: bytes) -> None:
    """Read the header: what a frame decodes to may be far larger than the file.

    Raises:
        VLLMValidationError: a frame has too many pixels.
    """
    stream = BytesIO(data)
    # Never released: OpenCV would let go of the stream without holding the interpreter's
    # lock, and crash if nobody else held it. It is closed when the object goes.
    capture = cv2.VideoCapture(stream, cv2.CAP_FFMPEG, [])  # type: ignore[call-overload]
    if not capture.isOpened():
        return  # another decoder may be set; it will say if it cannot either
    width = int(capture.get(cv2.CAP_PROP_FRAME_WIDTH))
    height = int(capture.get(cv2.CAP_PROP_FRAME_HEIGHT))
    if width * height > envs.VLLM_MAX_IMAGE_PIXELS:
        raise VLLMValidationError(
            f"Failed to load video: frames of {width * height} pixels, where "
            f"{envs.VLLM_MAX_IMAGE_PIXELS} are allowed"
        )


def _load_pictures(data: str, media_io: VideoMediaIO) -> Any:
    try:
        loaded = media_io.load_base64(PICTURES, data)
    except VLLMValidationError:
        raise
    except Exception as error:  # decoders raise whatever they stumble over
        raise VLLMValidationError(f"Failed to load video: {error}") from error
    how = f"{media_io.image_io.image_mode} {media_io.image_io.rgba_background_color}"
    return replace(loaded, original_bytes=loaded.original_bytes + how.encode())
