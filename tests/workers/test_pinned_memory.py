"""What is asked of CUDA, with a stand-in for it: there is no GPU here."""

from __future__ import annotations

import mmap
from types import SimpleNamespace

import pytest
import torch

from transfer.nixl.agent import address_of
from workers.pinned_memory import pin, unpin


class FakeCudart:
    """Remembers what is pinned."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.pinned[address] = nbytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        return int(self.pinned.pop(address, None) is None)


def check_error(error: int) -> None:
    if error:
        raise RuntimeError("no more memory may be locked")


def with_cuda(monkeypatch: pytest.MonkeyPatch, cudart: FakeCudart) -> memoryview:
    fake = {"is_available": lambda: True, "cudart": lambda: cudart, "check_error": check_error}
    for name, value in fake.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return memoryview(mmap.mmap(-1, 8192))


def test_memory_is_pinned_and_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = FakeCudart()
    memory = with_cuda(monkeypatch, cudart)
    assert pin(memory)
    assert cudart.pinned == {address_of(memory): 8192}
    unpin(memory)
    unpin(memory)
    assert cudart.pinned == {}


def test_memory_that_may_not_be_pinned_is_used_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory = with_cuda(monkeypatch, FakeCudart(error=2))
    assert not pin(memory)
    assert "no more memory may be locked" in caplog.text


def test_without_a_gpu_nothing_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "cudart", SimpleNamespace)
    memory = memoryview(mmap.mmap(-1, 8192))
    assert not pin(memory)
    unpin(memory)
