"""What an engine loads instead of encoding, and what it leases for how long."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from transfer.embeddings.entry import HEADER_BYTES
from transfer.embeddings.store import EmbeddingStore
from workers.embedding_loads import EmbeddingLoads

A, B = "image-" + "a" * 32, "image-" + "b" * 32
OUTPUT = torch.ones(4, 8)
STEPS = 2


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EmbeddingStore]:
    store = EmbeddingStore(tmp_path / "s", "key", HEADER_BYTES + OUTPUT.nbytes)
    store.save(A, OUTPUT)
    yield store
    store.close()


@pytest.fixture
def loads(store: EmbeddingStore) -> EmbeddingLoads:
    return EmbeddingLoads(store, STEPS)


def is_leased(store: EmbeddingStore) -> bool:
    """There is room for one: another one fits only if the first may go."""
    if store.save(B, OUTPUT):
        store.clear()
        return False
    return True


def test_what_is_offered_and_taken_is_loaded_once(loads: EmbeddingLoads):
    assert loads.offer(A)
    assert loads.offer(A)
    assert not loads.offer(B)
    loads.take("r", 0, A)
    loads.take("r", 1, B)  # the encoder runs
    [load] = loads.next_step()
    assert (load.identifier, load.request_id, load.index) == (A, "r", 0)
    assert load.path.startswith("/proc/")
    assert loads.next_step() == []


def test_what_is_offered_in_vain_is_let_go(loads: EmbeddingLoads, store: EmbeddingStore):
    loads.offer(A)
    loads.next_step()
    assert len(loads) == 0
    assert not is_leased(store)


def test_an_output_that_came_after_the_scheduler_asked_is_not_loaded(
    loads: EmbeddingLoads, store: EmbeddingStore
):
    store.clear()
    assert not loads.offer(A)
    store.save(A, OUTPUT)
    loads.take("r", 0, A)
    assert loads.next_step() == []


@pytest.mark.parametrize("how", ["freed", "finished"])
def test_a_lease_outlasts_the_steps_that_may_still_load_it(
    loads: EmbeddingLoads, store: EmbeddingStore, how: str
):
    loads.offer(A)
    loads.take("r", 0, A)
    loads.next_step()
    if how == "freed":
        loads.free("r", 0)
    else:
        loads.finish("r")
    assert len(loads) == 0
    for _ in range(STEPS):
        loads.next_step()
        assert is_leased(store)
    loads.next_step()
    assert not is_leased(store)


def test_a_preempted_request_loads_again_from_its_lease(
    loads: EmbeddingLoads, store: EmbeddingStore
):
    loads.offer(A)
    loads.take("r", 0, A)
    loads.next_step()
    store.clear()  # nobody else finds it any more
    loads.take("r", 0, A)
    [load] = loads.next_step()
    assert Path(load.path).stat().st_size == HEADER_BYTES + OUTPUT.nbytes


def test_what_has_no_pixels_is_held_from_the_start(
    loads: EmbeddingLoads, store: EmbeddingStore
):
    assert loads.hold("r", [(0, A)])
    loads.next_step()
    store.clear()
    assert loads.hold("r", [(0, A)])
    assert loads.offer(A)
    loads.take("r", 0, A)
    assert len(loads.next_step()) == 1


def test_what_has_no_pixels_and_no_output_cannot_be_computed(loads: EmbeddingLoads):
    assert not loads.hold("r", [(0, A), (1, B)])
    loads.finish("r")
    assert len(loads) == 0


def test_ending_twice_or_what_never_began_is_no_error(loads: EmbeddingLoads):
    loads.free("r", 3)
    loads.finish("r")
    loads.finish("r")
