"""Rearranged by runs, a tensor is what PyTorch makes of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from frontend.preprocess import run_copies
from frontend.preprocess.run_copies import SMALLEST, RunCopies

DTYPES = [torch.uint8, torch.bool, torch.int64, torch.float16, torch.bfloat16, torch.float32]


def numbers(shape: list[int] | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def patches(
    height: int, width: int, patch: int, dtype: torch.dtype, colours_last: bool = False
) -> torch.Tensor:
    """An image cut into patches, each twice, as processors do it; not yet copied."""
    image = numbers((1, 3, height * patch, width * patch), dtype)
    if colours_last:
        image = image.contiguous(memory_format=torch.channels_last)
    cut = image.view(1, 3, height // 2, 2, patch, width // 2, 2, patch)
    rows = cut.permute(0, 2, 5, 3, 6, 1, 4, 7).unsqueeze(6)
    return rows.expand(-1, -1, -1, -1, -1, -1, 2, -1, -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("patch", [14, 16])
@pytest.mark.parametrize("colours_last", [False, True])
def test_patches_are_equal(patch: int, dtype: torch.dtype, colours_last: bool) -> None:
    tensor = patches(10, 8, patch, dtype, colours_last)
    expected = tensor.reshape(1, 80, -1)
    with RunCopies():
        ours = tensor.reshape(1, 80, -1)
    assert ours.dtype == dtype
    assert ours.stride() == expected.stride()
    assert torch.equal(ours, expected)


@given(st.data())
def test_any_order_of_dimensions_is_equal(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    shape = data.draw(st.permutations([*shape, 64, 128]))
    tensor = numbers(shape, data.draw(st.sampled_from(DTYPES)))
    tensor = tensor.permute(data.draw(st.permutations(range(len(shape)))))
    start = data.draw(st.integers(0, tensor.shape[0] - 1))
    tensor = tensor[start:]
    expected = tensor.reshape(-1)
    with RunCopies():
        ours = tensor.reshape([-1])
    assert torch.equal(ours, expected)
    assert (ours.data_ptr() == tensor.data_ptr()) == (expected.data_ptr() == tensor.data_ptr())


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What was copied by runs."""
    copied: list[torch.Tensor] = []
    copy = run_copies.contiguous

    def copy_and_note(tensor: torch.Tensor) -> torch.Tensor | None:
        result = copy(tensor)
        if result is not None:
            copied.append(result)
        return result

    monkeypatch.setattr(run_copies, "contiguous", copy_and_note)
    return copied


@pytest.mark.parametrize("colours_last", [False, True])
def test_patches_are_copied_by_runs(
    colours_last: bool, copied: list[torch.Tensor]
) -> None:
    tensor = patches(10, 8, 14, torch.uint8, colours_last)
    with RunCopies():
        tensor.reshape(80, -1)
    assert len(copied) == 1
    tensor.reshape(80, -1)
    assert len(copied) == 1


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(64, 2048),
        torch.zeros(64, 2048).t(),
        torch.zeros(8, 64, 4, dtype=torch.uint8).transpose(0, 1),
        torch.zeros(64, 64, 64, requires_grad=True).transpose(0, 1),
        torch.zeros(64, 64, 64, dtype=torch.complex64).transpose(0, 1),
        torch.zeros(SMALLEST // 64 - 1, 2, 32, dtype=torch.uint8).transpose(0, 1),
    ],
    ids=["contiguous", "no runs", "short runs", "gradients", "complex", "small"],
)
def test_others_are_left_to_pytorch(
    tensor: torch.Tensor, copied: list[torch.Tensor]
) -> None:
    with RunCopies():
        assert torch.equal(tensor.reshape(-1), tensor.contiguous().view(-1))
    assert not copied


def test_a_shape_that_does_not_fit_is_refused_as_by_pytorch() -> None:
    tensor = patches(10, 8, 14, torch.uint8)
    with RunCopies(), pytest.raises(RuntimeError, match="invalid for input of size"):
        tensor.reshape(7, 11)
