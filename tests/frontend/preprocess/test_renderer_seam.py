"""Which requests are interrupted, and what is asked of the pool then."""

from __future__ import annotations

import asyncio
import io
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media.image import ImageMediaIO
from vllm.multimodal.parse import ImageProcessorItems

from frontend.preprocess.messages import Media, Work
from frontend.preprocess.renderer_seam import preprocess_beside
from tests.fakes import within

pytestmark = pytest.mark.anyio


def encoded(mode: str = "RGB", size: tuple[int, int] = (8, 6)) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, size).save(buffer, "PNG")
    return buffer.getvalue()


PNG, TRANSPARENT = encoded(), encoded("RGBA")
IMAGE = ImageMediaIO().load_bytes(PNG)


class FakeCache:
    def __init__(self, *known: str) -> None:
        self.known = set(known)

    def hold(self, mm_hash: str) -> object | None:
        return object() if mm_hash in self.known else None


class FakePool:
    def __init__(self, cache: FakeCache) -> None:
        self.asked: dict[str, Work] = {}
        self._cache = cache
        self.error: Exception | None = None
        self.does = True

    async def process(self, mm_hash: str, work: Work) -> object | None:
        self.asked[mm_hash] = work
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        if self.does:
            self._cache.known.add(mm_hash)
        return object() if self.does else None


class FakeRenderer:
    """As much of vLLM's renderer and processor as the seam touches."""

    def __init__(self, cache: FakeCache) -> None:
        self._cache = cache
        self._mm_executor = ThreadPoolExecutor(1)
        self.mm_processor: Any = SimpleNamespace(_get_cache_missing_items=self._find)
        self.passes = 0
        self.processed: list[str] = []

    def _find(self, cache: Any, mm_data_items: Any, mm_hashes: Any) -> list[str]:
        return [h for h in mm_hashes["image"] if h not in self._cache.known]

    def _process_multimodal(self, images: dict[str, Any], **kwargs: Any) -> list[str]:
        self.passes += 1
        items = {"image": ImageProcessorItems(list(images.values()))}
        self.processed = self.mm_processor._get_cache_missing_items(
            cache=self._cache, mm_data_items=items, mm_hashes={"image": list(images)}
        )
        return list(images)

    async def _process_multimodal_async(self, *args: Any, **kwargs: Any) -> list[str]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._mm_executor, lambda: self._process_multimodal(*args, **kwargs)
        )


class Seam:
    def __init__(self, *known: str) -> None:
        self.cache = FakeCache(*known)
        self.renderer: Any = FakeRenderer(self.cache)
        self.pool = FakePool(self.cache)
        preprocess_beside(self.renderer, self.pool, self.cache)  # type: ignore[arg-type]

    async def request(self, options: Any = None, **images: Any) -> Any:
        return await within(
            self.renderer._process_multimodal_async(images, mm_processor_kwargs=options)
        )


async def test_a_request_that_lacks_nothing_is_not_interrupted() -> None:
    seam = Seam("a")
    assert await seam.request(a=IMAGE) == ["a"]
    assert (seam.renderer.passes, seam.pool.asked) == (1, {})


async def test_what_is_lacking_is_made_before_vllm_starts_again() -> None:
    seam = Seam("b")
    assert await seam.request({"size": 3}, a=IMAGE, b=IMAGE, c=IMAGE) == ["a", "b", "c"]
    work = Work("image", Media(PNG, None, (255, 255, 255), "RGB"), {"size": 3})
    assert seam.pool.asked == {"a": work, "c": work}
    assert (seam.renderer.passes, seam.renderer.processed) == (2, [])


async def test_how_an_image_was_converted_goes_with_it() -> None:
    seam = Seam()
    blue = ImageMediaIO(rgba_background_color=[0, 0, 255]).load_bytes(TRANSPARENT)
    await seam.request(a=blue, b=ImageMediaIO(image_mode=None).load_bytes(TRANSPARENT))
    assert seam.pool.asked["a"].media == Media(TRANSPARENT, "RGB", (0, 0, 255), "RGB")
    assert seam.pool.asked["b"].media == Media(TRANSPARENT, None, (255, 255, 255), "RGBA")


async def test_what_the_pool_leaves_vllm_processes() -> None:
    seam = Seam()
    seam.pool.does = False
    await seam.request(a=IMAGE)
    assert (seam.renderer.passes, seam.renderer.processed) == (2, ["a"])


@pytest.mark.parametrize("image", [IMAGE.media, None], ids=["not encoded", "not sent"])
async def test_what_cannot_be_sent_does_not_interrupt(image: Any) -> None:
    seam = Seam()
    await seam.request(a=image)
    assert (seam.renderer.passes, seam.pool.asked) == (1, {})


@pytest.mark.parametrize("options", [{"a": object()}, {"a": (1, 2)}])
async def test_options_that_would_change_on_the_way_stay_here(options: Any) -> None:
    seam = Seam()
    await seam.request(options, a=IMAGE)
    assert (seam.renderer.passes, seam.pool.asked) == (1, {})


async def test_what_the_pool_refuses_the_request_is_refused_for() -> None:
    seam = Seam()
    seam.pool.error = VLLMValidationError("no image")
    with pytest.raises(VLLMValidationError, match="no image"):
        await seam.request(a=IMAGE, b=IMAGE)
    assert seam.renderer.passes == 1


async def test_a_text_model_has_nothing_to_interrupt() -> None:
    cache = FakeCache()
    renderer: Any = FakeRenderer(cache)
    renderer.mm_processor = None
    before = renderer._process_multimodal_async
    preprocess_beside(renderer, FakePool(cache), cache)  # type: ignore[arg-type]
    assert renderer._process_multimodal_async == before
