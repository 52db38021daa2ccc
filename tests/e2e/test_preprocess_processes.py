"""The demo model's real processor, beside the frontend and in it: no difference.

There is no engine and no HTTP here, but a processor takes as long to load.
"""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from prometheus_client import CollectorRegistry
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media import MediaWithBytes
from vllm.multimodal.media.image import ImageMediaIO
from vllm.renderers import BaseRenderer
from vllm.renderers.registry import renderer_from_config

from frontend.arena_cache import ArenaProcessorCache, IdentifiedItem
from frontend.command_line import parse
from frontend.preprocess.messages import Setup
from frontend.preprocess.metrics import PreprocessMetrics
from frontend.preprocess.pool import PoolSettings, PreprocessPool
from frontend.preprocess.processes import Template
from frontend.preprocess.renderer_seam import preprocess_beside
from frontend.vllm_seams import frontend_config
from tests.e2e.pictures import encoded, pattern, turned
from tests.fakes import HASHER
from transfer import pack
from transfer.arena import Arena

pytestmark = [pytest.mark.e2e, pytest.mark.anyio]

SEED = bytes(range(32))
SECONDS = 120.0


@dataclass
class Side:
    """A renderer and the cache behind it."""

    renderer: BaseRenderer[Any]
    cache: ArenaProcessorCache
    arena: Arena

    async def process(self, *images: Any, **options: Any) -> dict[str, Any]:
        config = self.renderer.model_config.hf_config
        around = [config.vision_start_token_id, config.image_token_id]
        return await asyncio.wait_for(
            self.renderer._process_multimodal_async(
                [*around * len(images), 65, 66],
                {"image": list(images)},
                mm_uuids=None,
                mm_processor_kwargs=options or None,
            ),
            SECONDS,
        )

    def tensors(self, item: IdentifiedItem) -> dict[str, Any]:
        whole = item
        if pack.is_packed(item):
            reference = pack.read_reference(item)
            whole = pack.resolve(item, self.arena.view(reference.entry), reference)
        return {name: elem.data for name, elem in whole.items()}


@pytest.fixture(scope="module")
def arenas() -> Iterator[tuple[Arena, Arena]]:
    with Arena(512 << 20) as beside, Arena(256 << 20) as within:
        yield beside, within


@pytest.fixture(scope="module", params=[1, 2])
async def made_beside(
    request: pytest.FixtureRequest, checkpoint: Path, arenas: tuple[Arena, Arena]
) -> AsyncIterator[tuple[Side, PreprocessPool]]:
    side = make_side(checkpoint, arenas[0])
    setup = Setup(flags(checkpoint), side.arena.id, SEED, "xxh3_128", "idle")
    pool = PreprocessPool(
        PoolSettings(request.param, 1000, SECONDS),
        lambda: Template(setup),
        side.arena,
        side.cache,
        PreprocessMetrics(CollectorRegistry()),
    )
    await pool.start()
    assert len(pool._serving) == request.param
    preprocess_beside(side.renderer, pool, side.cache)
    yield side, pool
    await pool.close()
    side.renderer.shutdown()


@pytest.fixture
def pool(made_beside: tuple[Side, PreprocessPool]) -> PreprocessPool:
    return made_beside[1]


@pytest.fixture
def beside(made_beside: tuple[Side, PreprocessPool]) -> Iterator[Side]:
    side, _ = made_beside
    yield side
    gc.collect()
    side.cache.clear_cache()
    stats = side.arena.stats()
    assert (stats.leased_entries, stats.bytes_used) == (0, 0)


@pytest.fixture(scope="module")
def made_within(checkpoint: Path, arenas: tuple[Arena, Arena]) -> Iterator[Side]:
    side = make_side(checkpoint, arenas[1])
    yield side
    side.renderer.shutdown()


@pytest.fixture
def within(made_within: Side) -> Iterator[Side]:
    yield made_within
    made_within.cache.clear_cache()


def make_side(checkpoint: Path, arena: Arena) -> Side:
    _, args = parse(flags(checkpoint))
    renderer = renderer_from_config(frontend_config(args))
    cache = ArenaProcessorCache(arena, HASHER, str(checkpoint))
    renderer._mm_processor_cache = cache
    return Side(renderer, cache, arena)


def flags(checkpoint: Path) -> tuple[str, ...]:
    return ("--model", str(checkpoint), "--dtype", "float32")


def media(data: bytes, **options: Any) -> MediaWithBytes[Image.Image]:
    return ImageMediaIO(**options).load_bytes(data)


def processed(pool: PreprocessPool) -> int:
    """How often a processor has run to its end."""
    [metric] = pool._metrics.seconds.collect()
    [count] = [s.value for s in metric.samples if s.name.endswith("_count")]
    return int(count)


PICTURE = pattern(301, 203)
HALF_TRANSPARENT = PICTURE.copy()
HALF_TRANSPARENT.putalpha(100)
KINDS: dict[str, MediaWithBytes[Image.Image]] = {
    "jpeg": media(encoded(PICTURE, "JPEG")),
    "png": media(encoded(PICTURE)),
    "webp": media(encoded(PICTURE, "WEBP", lossless=True)),
    "grey": media(encoded(PICTURE.convert("L"))),
    "bilevel": media(encoded(PICTURE.convert("1"))),
    "palette": media(encoded(PICTURE.convert("P"))),
    "cmyk": media(encoded(PICTURE.convert("CMYK"), "JPEG")),
    "transparent": media(encoded(HALF_TRANSPARENT)),
    "on blue": media(encoded(HALF_TRANSPARENT), rgba_background_color=[0, 0, 255]),
    "turned": media(turned(PICTURE, 6)),
    "large": media(encoded(pattern(2400, 1800), "JPEG")),
    "tiny": media(encoded(pattern(30, 30))),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_an_image_is_the_same_wherever_it_is_processed(
    beside: Side, within: Side, pool: PreprocessPool, kind: str
) -> None:
    before = processed(pool)
    theirs, ours = await within.process(KINDS[kind]), await beside.process(KINDS[kind])
    assert processed(pool) == before + 1
    for name in ("prompt_token_ids", "mm_hashes", "mm_placeholders"):
        assert ours[name] == theirs[name]
    [our_item], [their_item] = ours["mm_kwargs"]["image"], theirs["mm_kwargs"]["image"]
    assert our_item.identity == their_item.identity
    our_tensors, their_tensors = beside.tensors(our_item), within.tensors(their_item)
    assert our_tensors.keys() == their_tensors.keys()
    for name, tensor in their_tensors.items():
        assert our_tensors[name].dtype == tensor.dtype
        assert torch.equal(our_tensors[name], tensor)


async def test_processor_options_reach_the_process(beside: Side, within: Side) -> None:
    options = {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16}}
    plain = await beside.process(KINDS["large"])
    theirs = await within.process(KINDS["large"], **options)
    ours = await beside.process(KINDS["large"], **options)
    assert ours["prompt_token_ids"] == theirs["prompt_token_ids"]
    assert len(ours["prompt_token_ids"]) < len(plain["prompt_token_ids"])
    [our_item], [their_item] = ours["mm_kwargs"]["image"], theirs["mm_kwargs"]["image"]
    assert our_item.identity == their_item.identity


async def test_several_images_come_in_their_order(beside: Side, within: Side) -> None:
    images = [KINDS[name] for name in ("large", "tiny", "jpeg", "tiny")]
    await beside.process(KINDS["jpeg"])  # one of them is known
    theirs, ours = await within.process(*images), await beside.process(*images)
    for name in ("prompt_token_ids", "mm_hashes", "mm_placeholders"):
        assert ours[name] == theirs[name]
    assert [i.identity for i in ours["mm_kwargs"]["image"]] == [
        i.identity for i in theirs["mm_kwargs"]["image"]
    ]


async def test_an_image_that_many_send_at_once_is_processed_once(
    beside: Side, pool: PreprocessPool
) -> None:
    before = processed(pool)
    image = media(encoded(pattern(640, 480, seed=7), "JPEG"))
    results = await asyncio.gather(*(beside.process(image) for _ in range(64)))
    assert processed(pool) == before + 1
    assert len({r["mm_kwargs"]["image"][0].identity for r in results}) == 1


async def test_data_that_does_not_decode_is_refused(beside: Side) -> None:
    whole = encoded(PICTURE, "JPEG")
    damaged = MediaWithBytes(PICTURE, whole[: len(whole) // 2], None)
    with pytest.raises(VLLMValidationError, match="Failed to load image"):
        await beside.process(damaged)


async def test_what_the_processor_refuses_vllm_refuses_in_its_own_words(
    beside: Side, within: Side
) -> None:
    stripe = media(encoded(Image.new("RGB", (3000, 4))))
    with pytest.raises(ValueError) as theirs:
        await within.process(stripe)
    with pytest.raises(ValueError) as ours:
        await beside.process(stripe)
    assert ours.type is theirs.type
    address = re.compile("0x[0-9A-F]+")
    assert address.sub("", str(ours.value)) == address.sub("", str(theirs.value))


async def test_images_without_encoded_bytes_are_left_to_vllm(
    beside: Side, pool: PreprocessPool
) -> None:
    before = processed(pool)
    result = await beside.process(pattern(100, 100, seed=3))
    assert result["mm_kwargs"]["image"][0].identity
    assert processed(pool) == before


async def test_fifty_processes_killed_over_an_image_lose_nothing(
    beside: Side, within: Side, pool: PreprocessPool
) -> None:
    pictures = [encoded(pattern(640, 480, seed=seed), "JPEG") for seed in range(12)]
    images = [media(picture) for picture in pictures]
    expected = [
        (await within.process(image))["mm_kwargs"]["image"][0].identity for image in images
    ]
    killed: set[int] = set()

    async def kill_some() -> None:
        while len(killed) < 50:
            await asyncio.sleep(0.001 + 0.005 * (len(killed) % 4))  # at different points
            for pid, attempts in pool.running.items():
                # A second kill over one image would make it a poisonous one.
                if attempts == 1 and pid not in killed:
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)

    async def ask(number: int) -> None:
        # Bytes behind its end give a picture another mm_hash.
        which = number % len(pictures)
        data = pictures[which] + number.to_bytes(4, "big")
        result = await beside.process(MediaWithBytes(images[which].media, data, None))
        assert result["mm_kwargs"]["image"][0].identity == expected[which]

    async def ask_until_killed(number: int) -> None:
        while len(killed) < 50:
            await ask(number)
            number += 4

    killer = asyncio.create_task(kill_some())
    await asyncio.gather(*(ask_until_killed(first) for first in range(4)))
    await killer
    # Others had not begun, or had just finished.
    assert pool._metrics.crashes._value.get() >= 15  # type: ignore[attr-defined]
    assert len(pool._serving) == pool._settings.workers
