"""The multimodal items that are handed over, made alike in every process.

vLLM names relied on: multimodal.inputs.MultiModalKwargsItem, MultiModalFieldElem,
MultiModalBatchedField, MultiModalFlatField. Those of vLLM 0.31 do as well, since one of
the peers brings that version along.
"""

from __future__ import annotations

import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
)

MIB = 1 << 20
ROW_BYTES = 1024


def make_item(nbytes: int, number: int) -> MultiModalKwargsItem:
    """Return what Qwen-VL's processor does for a picture; another one for each number.

    ``nbytes`` are those of the pixels, uint8 ``[rows, ROW_BYTES]``.
    """
    pixels = torch.arange(nbytes // 8).view(torch.uint8)
    pixels[:8].view(torch.int64).fill_(-1 - number)
    rows = nbytes // ROW_BYTES
    flat = MultiModalFlatField(slices=[slice(0, rows)], dim=0)
    on_cpu = MultiModalBatchedField(keep_on_cpu=True)
    return MultiModalKwargsItem({
        "pixel_values": MultiModalFieldElem(pixels.view(rows, ROW_BYTES), flat),
        "image_grid_thw": MultiModalFieldElem(torch.tensor([1, 2 * rows, 2]), on_cpu),
    })


def pixels_of(item: MultiModalKwargsItem) -> torch.Tensor:
    """Return the pixels of an item, wherever they lie."""
    pixels = item["pixel_values"].data
    if not isinstance(pixels, torch.Tensor):
        raise TypeError("the pixels are not there")
    return pixels


def sum_of(pixels: torch.Tensor) -> int:
    """Read all bytes; the result tells pictures of one size apart."""
    return int(pixels.view(-1).view(torch.int64).sum().item())
