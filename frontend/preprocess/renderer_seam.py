"""Where the preprocess processes come into vLLM's renderer.

vLLM's processing of a request is left as it is. It is only interrupted, the first time,
at the point where it has found out what its cache lacks: those items are processed by
the pool, into the cache, and then vLLM starts again and finds them there. Whatever the
pool does not do, vLLM does then. A request that lacks nothing is not interrupted.

vLLM names relied on: BaseRenderer._process_multimodal_async (called by
_process_tokens_async), _process_multimodal, _mm_executor, mm_processor;
BaseMultiModalProcessor._get_cache_missing_items (called by _cached_apply_hf_processor
before anything is processed); MultiModalDataItems, ModalityDataItems.get_item_for_hash;
exceptions.VLLMValidationError.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from frontend.arena_cache import ArenaProcessorCache, Held
from frontend.preprocess.encoded_media import encoded_media
from frontend.preprocess.messages import Work
from frontend.preprocess.pool import PreprocessPool

if TYPE_CHECKING:
    from vllm.inputs import MultiModalHashes
    from vllm.multimodal.cache import BaseMultiModalProcessorCache
    from vllm.multimodal.parse import MultiModalDataItems
    from vllm.renderers.base import BaseRenderer

T = TypeVar("T")


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
    process_as_vllm = renderer._process_multimodal_async
    find_missing = processor._get_cache_missing_items
    first_look = threading.local()

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

    def process_first(options: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        first_look.options = options
        try:
            return renderer._process_multimodal(*args, **kwargs)
        finally:
            first_look.options = None

    async def process(*args: Any, **kwargs: Any) -> Any:
        options = _plain(kwargs.get("mm_processor_kwargs"))
        if options is None:
            return await process_as_vllm(*args, **kwargs)
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(
                renderer._mm_executor, lambda: process_first(options, *args, **kwargs)
            )
        except _Lacking as found:
            lacking, held = found.lacking, found.held
        processed = await _all(pool.process(*each) for each in lacking.items())
        try:
            return await process_as_vllm(*args, **kwargs)
        finally:
            # Until here what the pool has made stays where it is.
            del held, processed

    processor._get_cache_missing_items = find_missing_or_interrupt  # type: ignore[method-assign]
    renderer._process_multimodal_async = process


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
