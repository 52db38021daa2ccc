"""Where the preprocess processes come into vLLM's renderer.

vLLM's processing of a request is left as it is. It is only interrupted, the first time,
at the point where it has found out what its cache lacks: those items are processed by
the pool, into the cache, and then vLLM starts again and finds them there. Whatever the
pool does not do, vLLM does then. A request that lacks nothing is not interrupted.

What is left of the processing then takes a millisecond or so, if the images are few and
small. Then it is tried on the event loop: to hand it to vLLM's thread and back would cost
about as much again. It is left to the thread after all where vLLM turns to the model's
processor: some models never ask the cache.

vLLM names relied on: BaseRenderer._process_multimodal_async(prompt, mm_data, ...) (called by
_process_tokens_async), _process_multimodal, _mm_executor, mm_processor;
BaseMultiModalProcessor._get_cache_missing_items (called by _cached_apply_hf_processor
before anything is processed) and _apply_hf_processor_main(mm_items, hf_kwargs) (called for
whatever is processed); multimodal.media.MediaWithBytes; MultiModalDataItems.get_all_counts,
ModalityDataItems.get_item_for_hash; exceptions.VLLMValidationError;
BaseRenderer.clear_mm_cache and _clear_mm_cache_async.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from vllm.multimodal.media import MediaWithBytes

from frontend.arena_cache import ArenaProcessorCache, Held
from frontend.loop_turn import turn
from frontend.media.lazy_image import LazyImage
from frontend.preprocess.encoded_media import encoded_media
from frontend.preprocess.messages import Work
from frontend.preprocess.pool import PreprocessPool

if TYPE_CHECKING:
    from vllm.inputs import MultiModalHashes
    from vllm.multimodal.cache import BaseMultiModalProcessorCache
    from vllm.multimodal.parse import MultiModalDataItems
    from vllm.renderers.base import BaseRenderer

T = TypeVar("T")

LIGHT_IMAGES = 4
LIGHT_BYTES = 1 << 20
"""Of a request's encoded images: they are hashed in half a millisecond or so."""
LIGHT_TOKENS = 2048
"""Of its prompt without them; it is searched for their places."""


class _Heavy(Exception):
    """Interrupts vLLM: it was about to run the model's processor on the event loop."""


class _Lacking(Exception):
    """Interrupts vLLM: the cache lacks items that the pool can process."""

    def __init__(self, lacking: Mapping[str, Work], held: Sequence[Held]) -> None:
        super().__init__()
        self.lacking = lacking
        self.held = held
        """The request's other items, which must not be evicted meanwhile."""


def preprocess_beside(
    renderer: BaseRenderer[Any], pool: PreprocessPool, cache: ArenaProcessorCache
) -> None:
    """From now on have ``pool`` process what ``renderer`` would."""
    processor = renderer.mm_processor
    if processor is None:
        return
    find_missing = processor._get_cache_missing_items
    process_items = processor._apply_hf_processor_main
    here = threading.local()
    """What a thread is about: options, while it has its first look; is_loop."""
    processing = threading.Lock()
    """vLLM processes one request at a time; its processors count on it."""

    def find_missing_or_interrupt(
        cache: BaseMultiModalProcessorCache,
        mm_data_items: MultiModalDataItems,
        mm_hashes: MultiModalHashes,
    ) -> Any:
        options = getattr(here, "options", None)
        if options is not None:
            _interrupt_if_lacking(mm_data_items, mm_hashes, options)
        return find_missing(cache=cache, mm_data_items=mm_data_items, mm_hashes=mm_hashes)

    def _interrupt_if_lacking(
        items: MultiModalDataItems, hashes: MultiModalHashes, options: dict[str, Any]
    ) -> None:
        lacking: dict[str, Work] = {}
        held: list[Held] = []
        for modality, theirs in hashes.items():
            for index, mm_hash in enumerate(theirs):
                if (hold := cache.hold(mm_hash)) is not None:
                    held.append(hold)
                    continue
                media = encoded_media(items[modality].get_item_for_hash(index))
                if media is not None:
                    lacking[mm_hash] = Work(modality, media, options)
        if lacking:
            raise _Lacking(lacking, held)

    def process_unless_on_the_loop(
        mm_items: MultiModalDataItems, *args: Any, **kwargs: Any
    ) -> Any:
        if getattr(here, "is_loop", False) and any(mm_items.get_all_counts().values()):
            raise _Heavy
        return process_items(mm_items, *args, **kwargs)

    async def in_thread(work: Callable[[], T]) -> T:
        def work_alone() -> T:
            with processing:
                return work()

        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(renderer._mm_executor, work_alone)

    async def where_fit(work: Callable[[], T], light: bool) -> T:
        if light and turn.has_time() and processing.acquire(blocking=False):
            here.is_loop = True
            try:
                turn.spend()
                return work()
            except _Heavy:
                pass
            finally:
                here.is_loop = False
                processing.release()
        return await in_thread(work)

    def process_first(options: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        here.options = options
        try:
            return renderer._process_multimodal(*args, **kwargs)
        finally:
            here.options = None

    async def process(*args: Any, **kwargs: Any) -> Any:
        in_full = partial(renderer._process_multimodal, *args, **kwargs)
        options = _plain(kwargs.get("mm_processor_kwargs"))
        if options is None:
            return await in_thread(in_full)
        light = turn.has_time()
        if light:
            turn.spend()  # to look takes time, too
            light = _is_light(*args, **kwargs)
        try:
            return await where_fit(partial(process_first, options, *args, **kwargs), light)
        except _Lacking as found:
            lacking, held = found.lacking, found.held
        processed = await _all(pool.process(*each) for each in lacking.items())
        try:
            return await where_fit(in_full, light and all(processed))
        finally:
            # Until here what the pool has made stays where it is.
            del held, processed

    async def clear_cache() -> None:
        await in_thread(renderer.clear_mm_cache)

    renderer._clear_mm_cache_async = clear_cache
    processor._apply_hf_processor_main = process_unless_on_the_loop  # type: ignore[method-assign]
    processor._get_cache_missing_items = find_missing_or_interrupt  # type: ignore[method-assign]
    renderer._process_multimodal_async = process


def _is_light(
    prompt: Sequence[int],
    mm_data: Mapping[str, Any],
    *,
    mm_processor_kwargs: Any = None,
    skip_mm_cache: bool = False,
    **_: Any,
) -> bool:
    """Whether vLLM takes little time for a request, once its items are in the cache.

    So it is for a few images that were not decoded, without options of the processor.
    """
    images = mm_data.get("image")
    if len(mm_data) != 1 or not isinstance(images, list) or mm_processor_kwargs:
        return False
    if skip_mm_cache or len(prompt) > LIGHT_TOKENS:
        return False
    if len(images) > LIGHT_IMAGES:
        return False
    media = [image.media for image in images if type(image) is MediaWithBytes]
    pictures = [picture for picture in media if isinstance(picture, LazyImage)]
    if len(pictures) < len(images) or sum(len(p.data) for p in pictures) > LIGHT_BYTES:
        return False
    return all(picture.says_its_size for picture in pictures)  # else it would be decoded


def _plain(options: Any) -> dict[str, Any] | None:
    """Processor options as they reach another process; None if they would change."""
    plain = dict(options or {})
    try:
        same = msgspec.msgpack.decode(msgspec.msgpack.encode(plain)) == plain
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None
    return plain if same else None


async def _all(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all; the first that fails cancels the others and is raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
