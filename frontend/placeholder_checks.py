"""A prompt has as many places for images as it has images.

A user's text may hold the very string that stands for an image. Beside real images it would
be taken for the place of one: the images move up, and the last place stays empty.

vLLM names relied on: the MultiModalInput that BaseMultiModalProcessor.apply returns
(prompt_token_ids, mm_placeholders); PlaceholderRange.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.exceptions import VLLMValidationError

_NAMES = ("image_token_id", "image_token_index")


def image_token_of(hf_config: Any) -> int | None:
    """The token that a model's prompts have where images are; None where it names none."""
    for name in _NAMES:
        token = getattr(hf_config, name, None)
        if isinstance(token, int):
            return token
    return None


def check_placeholders(processed: Mapping[str, Any], image_token: int) -> None:
    """Make sure that no image's place is left without an image, where there are images.

    A text without images may speak of such tokens; they are text there.

    Raises:
        VLLMValidationError: there are more places than images.
    """
    places = processed.get("mm_placeholders") or {}
    if "image" not in places:
        return
    token_ids = processed["prompt_token_ids"]
    filled = sum(
        token_ids[place.offset : place.offset + place.length].count(image_token)
        for theirs in places.values()
        for place in theirs
    )
    if token_ids.count(image_token) > filled:
        raise VLLMValidationError(
            f"The prompt has places for more images than the {len(places['image'])} that "
            "came with it: its text may not hold the placeholder of an image."
        )
