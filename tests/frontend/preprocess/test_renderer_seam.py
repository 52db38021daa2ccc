"""Which requests are interrupted, and what is asked of the pool then."""

from __future__ import annotations

import asyncio
import io
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media import MediaWithBytes
from vllm.multimodal.media.image import ImageMediaIO
from vllm.multimodal.parse import ImageProcessorItems

from frontend.loop_turn import MOST_SECONDS, LoopTurn
from frontend.media.lazy_image import ImageOptions, load_lazily
from frontend.preprocess import renderer_seam
from frontend.preprocess.messages import Media, Work
from frontend.preprocess.renderer_seam import LIGHT_BYTES, LIGHT_TOKENS, preprocess_beside
from tests.fakes import PATIENCE, within
from tests.frontend.media.test_lazy_image import exif_with, with_late_chunk

pytestmark = pytest.mark.anyio


def encoded(mode: str = "RGB", size: tuple[int, int] = (8, 6), **extra: Any) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, size).save(buffer, "PNG", **extra)
    return buffer.getvalue()


PNG, TRANSPARENT = encoded(), encoded("RGBA")
IMAGE = ImageMediaIO().load_bytes(PNG)
TURNED = encoded(exif=exif_with(6))
LATE = with_late_chunk(PNG, b"tEXt", b"Comment\0late")


def lazy(data: bytes) -> MediaWithBytes[Image.Image]:
    return load_lazily(data, ImageOptions())


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


class Images(list[Any]):
    """Images with the hashes that they are to have."""

    hashes: list[str]


class FakeRenderer:
    """As much of vLLM's renderer and processor as the seam touches."""

    def __init__(self, cache: FakeCache) -> None:
        self._cache = cache
        self._mm_executor = ThreadPoolExecutor(1)
        self.mm_processor: Any = SimpleNamespace(
            _get_cache_missing_items=self._find, _apply_hf_processor_main=self._process
        )
        self.asks_the_cache = True
        self.cleared: list[threading.Thread] = []
        self.threads: list[threading.Thread] = []
        """Of each pass."""
        self.processed: list[str] = []

    @property
    def passes(self) -> int:
        return len(self.threads)

    def _find(self, cache: Any, mm_data_items: Any, mm_hashes: Any) -> list[str]:
        return [h for h in mm_hashes["image"] if h not in self._cache.known]

    def _process_multimodal(
        self, prompt: list[int], mm_data: dict[str, Images], **kwargs: Any
    ) -> list[str]:
        self.threads.append(threading.current_thread())
        images = mm_data["image"]
        missing = images.hashes
        if self.asks_the_cache:
            missing = self.mm_processor._get_cache_missing_items(
                cache=self._cache,
                mm_data_items={"image": ImageProcessorItems(images)},
                mm_hashes={"image": images.hashes},
            )
        counts = {"image": len(missing)}
        self.mm_processor._apply_hf_processor_main(
            mm_items=SimpleNamespace(get_all_counts=lambda: counts), hf_kwargs={}
        )
        self.processed = missing
        return images.hashes

    def _process(self, mm_items: Any, hf_kwargs: Any) -> None:
        if mm_items.get_all_counts()["image"]:
            assert threading.current_thread() is not threading.main_thread()

    def clear_mm_cache(self) -> None:
        self.cleared.append(threading.current_thread())

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

    async def request(
        self, options: Any = None, tokens: int = 9, skip: bool = False, **images: Any
    ) -> Any:
        named = Images(images.values())
        named.hashes = list(images)
        return await within(
            self.renderer._process_multimodal_async(
                [1] * tokens,
                {"image": named},
                mm_processor_kwargs=options,
                skip_mm_cache=skip,
            )
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


HERE = threading.main_thread()


async def test_what_takes_no_time_takes_no_thread() -> None:
    seam = Seam("a")
    await seam.request(a=lazy(PNG))
    assert seam.renderer.threads == [HERE]


async def test_what_lacked_something_takes_none_either() -> None:
    seam = Seam("b")
    await seam.request(a=lazy(PNG), b=lazy(PNG))
    assert seam.renderer.threads == [HERE, HERE]


async def test_what_the_pool_leaves_is_processed_in_a_thread() -> None:
    seam = Seam()
    seam.pool.does = False
    await seam.request(a=lazy(PNG), b=lazy(PNG))
    assert [thread is HERE for thread in seam.renderer.threads] == [True, False]
    assert seam.renderer.processed == ["a", "b"]


async def test_a_model_that_does_not_ask_the_cache_processes_in_a_thread() -> None:
    seam = Seam("a")
    seam.renderer.asks_the_cache = False
    assert await seam.request(a=lazy(PNG)) == ["a"]
    assert [thread is HERE for thread in seam.renderer.threads] == [True, False]
    assert seam.renderer.processed == ["a"]


async def test_what_takes_long_together_is_left_to_a_thread() -> None:
    seam = Seam("a", "b")
    process = seam.renderer._process_multimodal

    def slowly(*args: Any, **kwargs: Any) -> Any:
        time.sleep(2 * MOST_SECONDS)
        return process(*args, **kwargs)

    seam.renderer._process_multimodal = slowly
    await asyncio.gather(seam.request(a=lazy(PNG)), seam.request(b=lazy(PNG)))
    assert [thread is HERE for thread in seam.renderer.threads] == [True, False]


async def test_the_cache_is_not_cleared_while_a_request_looks_into_it() -> None:
    seam = Seam("a")
    looking, cleared = threading.Event(), threading.Event()
    process = seam.renderer._process_multimodal

    def slowly(*args: Any, **kwargs: Any) -> Any:
        looking.set()
        assert not cleared.wait(0.05)
        return process(*args, **kwargs)

    seam.renderer._process_multimodal = slowly

    async def clear() -> None:
        await seam.renderer._clear_mm_cache_async()
        cleared.set()

    request = asyncio.create_task(seam.request(a=IMAGE))
    assert await asyncio.to_thread(looking.wait, PATIENCE)
    await within(clear())
    await request
    assert len(seam.renderer.cleared) == 1


@pytest.mark.parametrize(
    "request_of",
    [
        lambda seam: seam.request(a=IMAGE),
        lambda seam: seam.request(a=lazy(PNG), b=IMAGE.media),
        lambda seam: seam.request(a=lazy(TURNED)),
        lambda seam: seam.request(a=lazy(LATE)),
        lambda seam: seam.request(a=lazy(PNG + bytes(LIGHT_BYTES))),
        lambda seam: seam.request(**dict.fromkeys("abcde", lazy(PNG))),
        lambda seam: seam.request({"size": 3}, a=lazy(PNG)),
        lambda seam: seam.request(tokens=LIGHT_TOKENS + 1, a=lazy(PNG)),
        lambda seam: seam.request(skip=True, a=lazy(PNG)),
    ],
    ids=["decoded", "embedded", "turned", "late metadata", "large", "many", "options", "long",
         "uncached"],
)
async def test_what_may_take_time_is_left_to_a_thread(request_of: Any) -> None:
    seam = Seam(*"abcde")
    await request_of(seam)
    assert HERE not in seam.renderer.threads
    assert seam.renderer.passes == 1


async def test_to_look_whether_it_takes_time_counts_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else each of many requests that are left to a thread would be looked at in one turn."""
    turn, looked = LoopTurn(0.0), []

    def look(*_: Any, **__: Any) -> bool:
        looked.append(turn.has_time())
        return False

    monkeypatch.setattr(renderer_seam, "turn", turn)
    monkeypatch.setattr(renderer_seam, "_is_light", look)
    seam = Seam("a", "b")
    await asyncio.gather(seam.request(a=IMAGE), seam.request(b=IMAGE))
    assert looked == [False]


async def test_two_requests_are_never_processed_at_once() -> None:
    seam = Seam("a", "b")
    begun, go_on = threading.Event(), threading.Event()
    process = seam.renderer._process_multimodal

    def slowly(*args: Any, **kwargs: Any) -> Any:
        begun.set()
        assert go_on.wait(PATIENCE)
        return process(*args, **kwargs)

    seam.renderer._process_multimodal = slowly
    slow = asyncio.create_task(seam.request(a=IMAGE))
    assert await asyncio.to_thread(begun.wait, PATIENCE)
    light = asyncio.create_task(seam.request(b=lazy(PNG)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not light.done()
    go_on.set()
    assert (await slow, await light) == (["a"], ["b"])
    assert HERE not in seam.renderer.threads


async def test_a_text_model_has_nothing_to_interrupt() -> None:
    cache = FakeCache()
    renderer: Any = FakeRenderer(cache)
    renderer.mm_processor = None
    before = renderer._process_multimodal_async
    preprocess_beside(renderer, FakePool(cache), cache)  # type: ignore[arg-type]
    assert renderer._process_multimodal_async == before
