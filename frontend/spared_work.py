"""Work that vLLM does for each request and that comes out the same each time.

A request whose items are all in the processor cache lacks none; vLLM asks the model's
processor nevertheless what belongs to the items that are lacking. And to see how many
items a chat may hold, it makes a processor for each chat.

vLLM names relied on: BaseMultiModalProcessor._get_mm_fields_config (called by
_cached_apply_hf_processor and _apply_hf_processor, and by models for their parents';
MultiModalKwargsItems.from_hf_inputs looks up what it names in the inputs) and
_get_mm_prompt_updates (called there too; no model overrides it; of its result
_merge_mm_kwargs looks up what belongs to the items that are lacking);
MultiModalDataItems.get_all_counts; renderers.chat_utils.BaseMultiModalItemTracker
(mm_processor, a cached property that is made of model_config alone).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vllm.renderers.chat_utils import BaseMultiModalItemTracker

if TYPE_CHECKING:
    from vllm.multimodal.parse import MultiModalDataItems
    from vllm.multimodal.processing import BaseMultiModalProcessor


def ask_nothing_about_no_items(processor: BaseMultiModalProcessor[Any]) -> None:
    """From now on do not ask ``processor`` what belongs to no items at all.

    Where a request has options they are still looked at: some are refused there.
    """
    fields_of = processor._get_mm_fields_config
    updates_of = processor._get_mm_prompt_updates

    def fields(hf_inputs: Any, hf_processor_mm_kwargs: Mapping[str, object]) -> Any:
        if not hf_inputs and not hf_processor_mm_kwargs:
            return {}
        return fields_of(hf_inputs, hf_processor_mm_kwargs)

    def updates(
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: Any,
    ) -> Any:
        if not hf_processor_mm_kwargs and not any(mm_items.get_all_counts().values()):
            return {}
        return updates_of(mm_items, hf_processor_mm_kwargs, out_mm_kwargs)

    processor._get_mm_fields_config = fields  # type: ignore[method-assign]
    processor._get_mm_prompt_updates = updates  # type: ignore[method-assign]


def one_processor_for_chats() -> property:
    """What takes the place of ``BaseMultiModalItemTracker.mm_processor``.

    It is vLLM's, made for the first chat with a model's configuration and then kept.
    """
    theirs = BaseMultiModalItemTracker.__dict__["mm_processor"]
    assert isinstance(theirs, cached_property)
    made: list[tuple[Any, Any]] = []

    def mm_processor(tracker: BaseMultiModalItemTracker[Any]) -> Any:
        config = tracker.model_config
        if not made or made[0][0] is not config:
            made[:] = [(config, theirs.func(tracker))]
        return made[0][1]

    return property(mm_processor)
