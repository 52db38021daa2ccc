"""Rearranging pixels a run at a time.

Image processors cut an image into patches by ``permute`` and ``reshape``, and PyTorch makes
that copy element by element: of one byte each, it is the dearest step of an image. Here
colours that alternate are first laid apart, and then the rows of patches lie in the image
as they will in the result: a row is moved at once, by NumPy. What comes out is the same
tensor.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

SHORTEST_RUN = 8
"""Bytes that must lie together, for the copy to be worth another way."""
MOST_COLOURS = 4
SMALLEST = 1 << 16
"""Bytes of a tensor, likewise."""


class RunCopies(TorchFunctionMode):
    """Within, in this thread, ``Tensor.reshape`` copies runs where it has to copy."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.reshape and not kwargs and _is_out_of_order(args[0]):
            return _reshape(*args)
        return func(*args, **(kwargs or {}))


def contiguous(tensor: torch.Tensor) -> torch.Tensor | None:
    """A contiguous copy of a tensor in CPU memory; None where runs are too short."""
    tensor = _colours_apart(tensor)
    if tensor.stride(-1) != 1 or tensor.shape[-1] * tensor.element_size() < SHORTEST_RUN:
        return None
    rows = tensor.view(torch.uint8).numpy()
    # Of no type but a size: each is moved as it is.
    copied = rows.view(f"V{rows.shape[-1]}").copy(order="C")
    return torch.from_numpy(copied.view(rows.dtype)).view(tensor.dtype)


def _colours_apart(tensor: torch.Tensor) -> torch.Tensor:
    """The same, each colour by itself in memory, if its bytes are colours that alternate."""
    strides = tensor.stride()
    colours = strides[-1]
    if tensor.element_size() > 1 or not 1 < colours <= MOST_COLOURS or 1 not in strides:
        return tensor
    at = strides.index(1)
    others = [stride for stride in strides if stride != 1]
    if tensor.shape[at] != colours or len(others) < len(strides) - 1:
        return tensor
    if any(stride % colours for stride in others):
        return tensor
    outer = zip(tensor.shape, strides, strict=True)
    pixels = sum((n - 1) * s // colours for n, s in outer if s != 1) + 1
    together = tensor.as_strided((colours, pixels), (1, colours))
    bytewise = together.view(torch.uint8).numpy()  # NumPy does not know all of torch's types
    apart = torch.from_numpy(np.ascontiguousarray(bytewise)).view(tensor.dtype)
    return apart.as_strided(
        tensor.shape, [pixels if s == 1 else s // colours for s in strides]
    )


def _is_out_of_order(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.dim() > 1
        and tensor.numel() * tensor.element_size() >= SMALLEST
        and not tensor.is_contiguous()
        and tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad or tensor.is_complex())
    )


def _reshape(tensor: torch.Tensor, *shape: Any) -> torch.Tensor:
    try:
        return tensor.view(*shape)  # as reshape does where nothing needs to be copied
    except RuntimeError:
        copied = contiguous(tensor)
    return tensor.reshape(*shape) if copied is None else copied.view(*shape)
