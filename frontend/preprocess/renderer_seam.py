"""Where the preprocess processes come into vLLM's renderer.

vLLM's processing of a request is left as it is. It is only interrupted, the first time,
at the point where it has found out what its cache lacks: those items are processed by
the pool, into the cache, and then vLLM starts again and finds them there. Whatever the
pool does not do, vLLM does then. A request that lacks nothing is not interrupted.

What is left of the processing then takes a millisecond or so. Where that is sure, it is done
on the event loop: to hand it to vLLM's thread and back would cost about as much again.

vLLM names relied on: BaseRenderer._process_multimodal_async(prompt, mm_data, ...) (called by
_process_tokens_async), _process_multimodal, _mm_executor, mm_processor;
BaseMultiModalProcessor._get_cache_missing_items (called by _cached_apply_hf_processor
before anything is processed); multimodal.media.MediaWithBytes; MultiModalDataItems,
ModalityDataItems.get_item_for_hash; exceptions.VLLMValidationError.
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

LIGHT_BYTES = 1 << 20
"""Of a request's encoded images: they are hashed in half a millisecond or so."""
LIGHT_TOKENS = 2048
"""Of its prompt without them; it is searched for their places."""


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
    first_look = threading.local()
    processing = threading.Lock()
    """vLLM processes one request at a time; its processors count on it."""

    def find_missing_or_interrupt(
        cache: BaseMultiModalProcessorCache,
        mm_data_items: MultiModalDataItems,
        mm_hashes: MultiModalHashes,
    ) -> Any:
        options = getattr(first_look, "options", None)
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

    async def in_thread(work: Callable[[], T]) -> T:
        def work_alone() -> T:
            with processing:
                return work()

        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(renderer._mm_executor, work_alone)

    def process_first(options: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        first_look.options = options
        try:
            return renderer._process_multimodal(*args, **kwargs)
        finally:
            first_look.options = None

    async def process(*args: Any, **kwargs: Any) -> Any:
        in_full = partial(renderer._process_multimodal, *args, **kwargs)
        options = _plain(kwargs.get("mm_processor_kwargs"))
        if options is None:
            return await in_thread(in_full)
        first = partial(process_first, options, *args, **kwargs)
        light = _is_light(*args, **kwargs)
        try:
            if light and processing.acquire(blocking=False):
                try:
                    return first()
                finally:
                    processing.release()
            return await in_thread(first)
        except _Lacking as found:
            lacking, held = found.lacking, found.held
        processed = await _all(pool.process(*each) for each in lacking.items())
        try:
            if light and all(processed) and processing.acquire(blocking=False):
                try:
                    return in_full()
                finally:
                    processing.release()
            return await in_thread(in_full)
        finally:
            # Until here what the pool has made stays where it is.
            del held, processed

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
    nbytes = 0
    for image in images:
        media = image.media if type(image) is MediaWithBytes else None
        if not isinstance(media, LazyImage) or not media.says_its_size:
            return False  # perhaps it would be decoded here
        nbytes += len(media.data)
    return nbytes <= LIGHT_BYTES


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
