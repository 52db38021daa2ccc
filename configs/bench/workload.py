"""What ``foveal bench`` asks: chats with pictures drawn at random from a pool."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

WORDS = (
    "describe", "what", "you", "see", "name", "the", "largest", "shape", "then", "its",
    "colours", "where", "light", "comes", "from", "say", "which", "is", "in", "foreground",
)


@dataclass(frozen=True)
class Workload:
    """One load, the same for the same ``seed``."""

    model: str
    requests: int = 64
    pictures: int = 1
    """In each request; 0: text only."""
    pool: int = 16
    """Different pictures there are; 0: none is shown twice."""
    width: int = 1024
    height: int = 768
    words: int = 40
    """Of text in each request."""
    max_tokens: int = 32
    seed: int = 1

    def bodies(self) -> Iterator[dict[str, Any]]:
        """The requests, in order, as JSON to post to /v1/chat/completions."""
        chance = random.Random(self.seed)
        urls = [self._picture(number) for number in range(self.pool * bool(self.pictures))]
        for number in range(self.requests):
            if self.pool:
                shown = chance.choices(urls, k=self.pictures) if urls else []
            else:
                first = number * self.pictures
                shown = [self._picture(first + place) for place in range(self.pictures)]
            text = " ".join([f"{number}:", *chance.choices(WORDS, k=self.words)])
            parts = [{"type": "image_url", "image_url": {"url": url}} for url in shown]
            yield {
                "model": self.model,
                "messages": [
                    {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
                ],
                "max_tokens": self.max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }

    def _picture(self, number: int) -> str:
        """A JPEG as a data URL: smooth shapes with some noise, as photographs have."""
        chance = np.random.default_rng([self.seed, number])
        small = chance.integers(0, 256, (12, 16, 3), dtype=np.uint8)
        picture = Image.fromarray(small).resize(
            (self.width, self.height), Image.Resampling.BICUBIC
        )
        noisy = np.asarray(picture, np.int16) + chance.integers(
            -8, 9, (self.height, self.width, 1), dtype=np.int16
        )
        file = io.BytesIO()
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=85)
        return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
