"""What families are shown: made-up films and sounds, and the parts of messages they go in."""

from __future__ import annotations

import base64
import io
import tempfile
import wave
from functools import cache
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from tests.e2e.pictures import pattern

FRAMES_PER_SECOND = 8
SAMPLES_PER_SECOND = 16000


@cache
def film(frames: int, seed: int = 0, size: tuple[int, int] = (112, 84)) -> bytes:
    """An MP4 whose every frame differs; ``size`` is width and height in pixels."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "film.mp4")
        code = cv2.VideoWriter.fourcc(*"mp4v")
        writer = cv2.VideoWriter(str(path), code, FRAMES_PER_SECOND, size)
        for number in range(frames):
            pixels = np.asarray(pattern(*size, 100 * seed + number))
            writer.write(np.ascontiguousarray(pixels[:, :, ::-1]))
        writer.release()
        return path.read_bytes()


@cache
def sound(seconds: float, seed: int = 0) -> bytes:
    """A WAV of one channel: a tone that wanders, and noise."""
    random = np.random.default_rng(seed)
    times = np.arange(int(seconds * SAMPLES_PER_SECOND)) / SAMPLES_PER_SECOND
    pitch, sway = random.uniform(200, 900), random.uniform(1, 5)
    samples = 0.5 * np.sin(2 * np.pi * pitch * times + 20 * np.sin(sway * times))
    samples += random.normal(0, 0.05, len(times))
    with io.BytesIO() as buffer, wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLES_PER_SECOND)
        file.writeframes((samples.clip(-1, 1) * 32767).astype("<i2").tobytes())
        file.close()
        return buffer.getvalue()


def by_url(kind: str, url: str, **more: Any) -> dict[str, Any]:
    """The part of a message that has ``kind`` (image, video, audio) at an address."""
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}, **more}


def in_place(kind: str, form: str, data: bytes, **more: Any) -> dict[str, Any]:
    """The same with the data in the address."""
    return by_url(kind, f"data:{kind}/{form};base64,{base64.b64encode(data).decode()}", **more)


def filmed(frames: int, seed: int = 0) -> dict[str, Any]:
    return in_place("video", "mp4", film(frames, seed))


def heard(seconds: float, seed: int = 0) -> dict[str, Any]:
    return in_place("audio", "wav", sound(seconds, seed))
