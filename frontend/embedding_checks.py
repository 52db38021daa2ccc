"""Embeddings that clients send instead of pictures, checked before a worker sees them.

vLLM checks rank and width where a model takes plain tensors, and neither where it takes
them with a grid, as Qwen-VL does; it looks at neither dtype nor values. An engine that is
given what does not fit dies, with everybody's requests, and a grid made up large enough
takes all memory of whoever expands it.

vLLM names relied on: multimodal.inputs.MultiModalFeatureSpec, PlaceholderRange
(get_num_embeds); ModelConfig (get_inputs_embeds_size, dtype, hf_config), and that fields
are named as in MultiModalDataParser.embedding_fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.inputs import MultiModalFeatureSpec

EMBEDS = "_embeds"
GRID = "_grid_thw"
"""What the names of fields with embeddings and with grids of patches end with."""


@dataclass(frozen=True)
class EmbeddingLimits:
    """What the model can take."""

    width: int
    """Values per token."""
    dtype: torch.dtype
    """What the model computes with: values must be finite in it."""
    merge: int = 1
    """So many patches, in height and in width, make one token."""


def limits_of(model: ModelConfig) -> EmbeddingLimits:
    """Read the limits from the model's configuration."""
    vision = getattr(model.hf_config, "vision_config", None)
    # Qwen3-VL's encoder puts the outputs of some of its layers behind the last one's.
    layers = 1 + len(getattr(vision, "deepstack_visual_indexes", None) or ())
    if not isinstance(model.dtype, torch.dtype):
        raise TypeError(f"dtype {model.dtype} has not been resolved")
    return EmbeddingLimits(
        width=model.get_inputs_embeds_size() * layers,
        dtype=model.dtype,
        merge=getattr(vision, "spatial_merge_size", None) or 1,
    )


def check_embeddings(feature: MultiModalFeatureSpec, limits: EmbeddingLimits) -> None:
    """Make sure that the model can use the embeddings of ``feature``, if it has any.

    They are of shape (tokens, width) and of a floating dtype.

    Raises:
        VLLMValidationError: it cannot; the text says why.
    """
    for name, elem in (feature.data or {}).items():
        if name.endswith(EMBEDS) and elem.data is not None:
            rows = _check_values(name, elem.data, limits)
            if rows != (wanted := feature.mm_position.get_num_embeds()):
                raise _refused(name, f"are {rows} rows for {wanted} tokens")


def check_embedding_data(data: Mapping[str, Any], limits: EmbeddingLimits) -> None:
    """The same for what a client has sent, before it is expanded into a prompt.

    ``data`` is by modality; embeddings that come with a grid are a mapping of tensors.

    Raises:
        VLLMValidationError: it cannot be used; the text says why.
    """
    for fields in data.values():
        if not isinstance(fields, Mapping):
            continue
        rows = {
            name: sum(_check_values(name, part, limits) for part in _parts(value))
            for name, value in fields.items()
            if name.endswith(EMBEDS)
        }
        for name, value in fields.items():
            if name.endswith(GRID):
                tokens = sum(_tokens(name, part, limits.merge) for part in _parts(value))
                for embeds, count in rows.items():
                    if count != tokens:
                        raise _refused(embeds, f"are {count} rows for a grid of {tokens}")


def _check_values(name: str, tensor: Any, limits: EmbeddingLimits) -> int:
    """Return how many rows there are."""
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
        raise _refused(name, f"must be floats, not {getattr(tensor, 'dtype', 'lists')}")
    shape = tuple(tensor.shape)
    if len(shape) != 2 or shape[1] != limits.width:
        raise _refused(name, f"must be of shape (tokens, {limits.width}), not {shape}")
    if not bool(tensor.to(limits.dtype).isfinite().all()):
        raise _refused(name, f"must be finite, as {limits.dtype} too")
    return shape[0]


def _tokens(name: str, grid: Any, merge: int) -> int:
    """Return how many tokens grids of patches make; each is (time, height, width)."""
    if not isinstance(grid, torch.Tensor) or grid.dtype not in (torch.int32, torch.int64):
        raise _refused(name, f"must be integers, not {getattr(grid, 'dtype', 'lists')}")
    if grid.dim() not in (1, 2) or grid.shape[-1] != 3:
        raise _refused(name, f"must be of shape (items, 3), not {tuple(grid.shape)}")
    # As Python's integers, which do not overflow.
    grids = [[int(n) for n in one] for one in grid.reshape(-1, 3)]
    if any(n < 1 for one in grids for n in one):
        raise _refused(name, "must be positive")
    if any(n % merge for _, *sides in grids for n in sides):
        raise _refused(name, f"must have a height and width divisible by {merge}")
    return sum(prod(one) for one in grids) // merge**2


def _parts(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _refused(name: str, reason: str) -> VLLMValidationError:
    return VLLMValidationError(f"{name} {reason}", parameter=name)
