"""What the load asks."""

from __future__ import annotations

import base64
import io
import itertools
from dataclasses import replace
from typing import Any

import pytest
from PIL import Image

from configs.bench.workload import Workload

SMALL = Workload("m", requests=6, pictures=2, pool=3, width=64, height=48, words=5)


def pictures(body: dict[str, Any]) -> list[str]:
    parts = body["messages"][0]["content"]
    return [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]


def test_the_same_seed_asks_the_same() -> None:
    assert list(SMALL.bodies()) == list(SMALL.bodies())
    assert list(SMALL.bodies()) != list(replace(SMALL, seed=2).bodies())


def test_pictures_come_from_the_pool_in_their_size() -> None:
    bodies = list(SMALL.bodies())
    assert len(bodies) == 6
    shown = [url for body in bodies for url in pictures(body)]
    assert len(shown) == 12 and 1 < len(set(shown)) <= 3
    data = base64.b64decode(shown[0].partition(",")[2])
    assert Image.open(io.BytesIO(data)).size == (64, 48)


def test_without_a_pool_no_picture_comes_twice() -> None:
    shown = [url for body in replace(SMALL, pool=0).bodies() for url in pictures(body)]
    assert len(set(shown)) == 12


@pytest.mark.parametrize("pool", [0, 3])
def test_text_alone(pool: int) -> None:
    bodies = list(replace(SMALL, pictures=0, pool=pool).bodies())
    assert list(itertools.chain(*map(pictures, bodies))) == []
    assert all(body["messages"][0]["content"][0]["text"] for body in bodies)
