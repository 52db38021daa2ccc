"""Places for images in a prompt, counted against the images."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.inputs import PlaceholderRange

from frontend.placeholder_checks import check_placeholders, image_token_of

IMAGE = 9


def processed(token_ids: list[int], **places: list[tuple[int, int]]) -> dict[str, Any]:
    return {
        "prompt_token_ids": token_ids,
        "mm_placeholders": {
            modality: [PlaceholderRange(offset=o, length=n) for o, n in theirs]
            for modality, theirs in places.items()
        },
    }


@pytest.mark.parametrize(
    "prompt",
    [
        processed([1, 9, 9, 2], image=[(1, 2)]),
        processed([9, 9, 9], image=[(0, 1), (1, 2)]),
        processed([8, 9, 7, 9], image=[(0, 4)]),  # with tokens of other kinds among them
        processed([1, 9, 2]),  # a text about such tokens
        processed([9, 1, 5, 5], audio=[(2, 2)]),
        {"prompt_token_ids": [9, 9]},
    ],
)
def test_as_many_places_as_images_pass(prompt: dict[str, Any]) -> None:
    check_placeholders(prompt, IMAGE)


@pytest.mark.parametrize(
    "prompt",
    [
        processed([9, 1, 9, 9], image=[(2, 2)]),
        processed([9, 9, 9], image=[(0, 2)]),
        processed([1, 9, 4, 4, 9], image=[(1, 1)], video=[(2, 2)]),
    ],
)
def test_a_place_without_an_image_is_refused(prompt: dict[str, Any]) -> None:
    with pytest.raises(VLLMValidationError, match="more images than the 1"):
        check_placeholders(prompt, IMAGE)


def test_the_token_is_the_models() -> None:
    assert image_token_of(SimpleNamespace(image_token_id=9)) == 9
    assert image_token_of(SimpleNamespace(image_token_index=8)) == 8
    assert image_token_of(SimpleNamespace(image_token_id=None)) is None
    assert image_token_of(SimpleNamespace()) is None
