"""Embeddings that the model cannot use are refused; those it can are let through."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from vllm.config import ModelConfig
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)

from frontend.embedding_checks import (
    EmbeddingLimits,
    check_embedding_data,
    check_embeddings,
    limits_of,
)
from tests.fakes import make_item

LIMITS = EmbeddingLimits(width=8, dtype=torch.float16, merge=2)
GRID = torch.tensor([[1, 4, 4]])


def feature(data: Any, tokens: int = 4, name: str = "image_embeds") -> MultiModalFeatureSpec:
    item = MultiModalKwargsItem({name: MultiModalFieldElem(data, MultiModalBatchedField())})
    return MultiModalFeatureSpec(
        data=item,
        modality="image",
        identifier="i",
        mm_position=PlaceholderRange(offset=0, length=tokens),
        mm_hash="i",
    )


def spoiled(value: float) -> torch.Tensor:
    values = torch.rand(4, 8, dtype=torch.float64)
    values[2, 3] = value
    return values


FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_fits_is_let_through(dtype: torch.dtype) -> None:
    values = torch.rand(4, 8).to(dtype)
    check_embeddings(feature(values), LIMITS)
    check_embedding_data({"image": {"image_embeds": values, "image_grid_thw": GRID}}, LIMITS)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (torch.rand(4 * 8), "shape"),
        (torch.tensor(1.0), "shape"),
        (torch.rand(1, 4, 8), "shape"),
        (torch.rand(4, 7), "shape"),
        (torch.rand(4, 16), "shape"),
        (torch.rand(5, 8), "5 rows"),
        (torch.rand(3, 8), "3 rows"),
        (torch.rand(0, 8), "0 rows"),
        (torch.ones(4, 8, dtype=torch.int64), "floats"),
        (torch.ones(4, 8, dtype=torch.complex64), "floats"),
        ("a string", "floats"),
        (spoiled(float("nan")), "finite"),
        (spoiled(float("-inf")), "finite"),
        (spoiled(1e6), "finite"),  # not in float16
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(values: Any, reason: str) -> None:
    with pytest.raises(VLLMValidationError, match=reason):
        check_embeddings(feature(values), LIMITS)
    with pytest.raises(VLLMValidationError, match=reason):
        check_embedding_data(
            {"image": {"image_embeds": values, "image_grid_thw": GRID}}, LIMITS
        )


@pytest.mark.parametrize(
    ("grid", "reason"),
    [
        ([[1, 4, 6]], "for a grid of 6"),
        ([[1, 4, 4], [1, 4, 4]], "for a grid of 8"),
        ([[1, 3, 5]], "divisible by 2"),
        ([[0, 4, 4]], "positive"),
        ([[1, -4, -4]], "positive"),
        ([[1 << 40, 1 << 40, 4]], "for a grid"),
        ([1, 4, 4, 4], "shape"),
        ([[1.0, 4.0, 4.0]], "integers"),
    ],
)
def test_a_grid_that_does_not_fit_is_refused(grid: Any, reason: str) -> None:
    data = {"image_embeds": torch.rand(4, 8), "image_grid_thw": torch.tensor(grid)}
    with pytest.raises(VLLMValidationError, match=reason):
        check_embedding_data({"image": data}, LIMITS)


def test_items_may_come_apart() -> None:
    data = {"video_embeds": [torch.rand(4, 8)] * 2, "video_grid_thw": [GRID[0], GRID[0]]}
    check_embedding_data({"video": data}, LIMITS)


def test_pictures_and_what_is_in_the_arena_already_are_left_alone() -> None:
    check_embeddings(feature(None), LIMITS)
    check_embeddings(feature(torch.ones(3, dtype=torch.int64), name="pixel_values"), LIMITS)
    check_embedding_data({"image": [make_item(1.0)], "audio": object()}, LIMITS)


def test_the_limits_are_the_models() -> None:
    vision = SimpleNamespace(spatial_merge_size=2, deepstack_visual_indexes=[3, 6, 9])
    model = SimpleNamespace(
        hf_config=SimpleNamespace(vision_config=vision),
        dtype=torch.bfloat16,
        get_inputs_embeds_size=lambda: 100,
    )
    assert limits_of(cast("ModelConfig", model)) == EmbeddingLimits(400, torch.bfloat16, 2)
    model.hf_config = SimpleNamespace()
    assert limits_of(cast("ModelConfig", model)) == EmbeddingLimits(100, torch.bfloat16, 1)
