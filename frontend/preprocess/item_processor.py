"""vLLM's multimodal processor, for one item at a time, away from any prompt.

vLLM names relied on: BaseMultiModalProcessor._cached_apply_hf_processor and how it uses
its cache (is_cached, then get_and_update_item with what it made);
MULTIMODAL_REGISTRY.create_processor; ProcessorInputs, TimingContext;
InputProcessingInfo.parse_mm_data; BaseMultiModalProcessor.get_dummy_mm_inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.multimodal.cache import BaseMultiModalProcessorCache
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.multimodal.processing import ProcessorInputs
from vllm.multimodal.processing.context import TimingContext
from vllm.utils.cache import CacheInfo

from frontend.media.lazy_image import ImageOptions, load_lazily
from frontend.preprocess.messages import Media
from frontend.preprocess.run_copies import RunCopies

if TYPE_CHECKING:
    from vllm.multimodal.processing import BaseMultiModalProcessor
    from vllm.multimodal.processing.processor import ResolvedPromptUpdate

FAILED = "Failed to load image: "

Processed = tuple[MultiModalKwargsItem, Sequence["ResolvedPromptUpdate"]]


class Unreadable(ValueError):
    """The media cannot be decoded."""


class ItemProcessor:
    """Decodes and processes one item as vLLM would for a whole request."""

    def __init__(self, processor: BaseMultiModalProcessor[Any]) -> None:
        self._processor = processor

    def warm(self) -> None:
        """Process the model's dummy inputs, so that everything has been loaded and run."""
        info = self._processor.info
        wanted = {name: 1 for name, most in info.allowed_mm_limits.items() if most}
        if "image" in wanted:
            self._processor.get_dummy_mm_inputs({"image": 1})

    def process(
        self, modality: str, media: Media, processor_options: Mapping[str, Any]
    ) -> Processed:
        """Return the item and what it does to the prompt.

        Raises:
            Unreadable: the media cannot be decoded, or is not what its header said.
            Exception: whatever the model's processor raises.
        """
        return self._process(modality, _decoded(media), processor_options)

    def _process(
        self, modality: str, data: Any, processor_options: Mapping[str, Any]
    ) -> Processed:
        items = self._processor.info.parse_mm_data({modality: [data]}, validate=False)
        catch = _Catch()
        inputs = ProcessorInputs(
            prompt=[],
            mm_data_items=items,
            # A name is given, so that the item is not hashed again.
            mm_uuid_items={modality: ["item"]},
            hf_processor_mm_kwargs=processor_options,
            cache=catch,
        )
        with RunCopies():
            self._processor._cached_apply_hf_processor(inputs, TimingContext(enabled=False))
        if len(catch.caught) != 1:
            raise ValueError(f"one {modality} became {len(catch.caught)} items")
        return catch.caught[0]


def _decoded(media: Media) -> Any:
    """Raises: Unreadable: it cannot be decoded, or is not what its header said."""
    try:
        # Lazily, for its copy: vLLM makes one of each image, and this one gives its pixels.
        image = load_lazily(media.data, ImageOptions(media.image_mode, media.background))
        image.media.load()
    except MemoryError:
        raise
    except Exception as error:  # decoders raise whatever they stumble over
        text = str(error).removeprefix(FAILED)
        raise Unreadable(f"{FAILED}{text}") from error
    was_converted = image.io_config is not None
    if was_converted != (media.image_mode is not None) or image.media.mode != media.mode:
        # It was hashed, and perhaps found, as what it is not.
        raise Unreadable(f"{FAILED}its header is not true")
    return image


class _Catch(BaseMultiModalProcessorCache):
    """A cache that knows nothing and keeps hold of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.caught: list[Processed] = []

    def is_cached_item(self, mm_hash: str) -> bool:
        return False

    def get_and_update_item(
        self, mm_item: Processed | None, mm_hash: str
    ) -> tuple[MultiModalKwargsItem | None, Sequence[ResolvedPromptUpdate]]:
        if mm_item is None:
            raise ValueError("nothing was said to be cached")
        self.caught.append(mm_item)
        return mm_item

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        pass

    def clear_cache(self) -> None:
        self.caught.clear()

    def make_stats(self, *, delta: bool = False) -> CacheInfo:
        return CacheInfo(hits=0, total=0)
