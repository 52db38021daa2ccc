"""References become tensors over the mapping, just before the model runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem
from vllm.multimodal.utils import strip_covered_mm_data

from frontend.arena_cache import ArenaProcessorCache
from tests.fakes import (
    FakeArenaReader,
    handles_on,
    make_item,
    make_reader,
    make_request,
)
from transfer.arena import Arena
from transfer.errors import StaleRef


@pytest.fixture
def reader(arena: Arena) -> Iterator[FakeArenaReader]:
    reader = make_reader()
    assert reader.attach_arena(arena.id.name, arena.id.nonce) == ""
    yield reader
    for name in list(reader._arenas):
        reader.detach_arena(name)


def execute(
    reader: FakeArenaReader, *features: MultiModalFeatureSpec
) -> list[MultiModalFeatureSpec]:
    """What the model runner gets to see of a new request with these items."""
    new = SimpleNamespace(mm_features=list(features))
    step = SimpleNamespace(scheduled_new_reqs=[new])
    assert reader.execute_model(cast("Any", step)) == "computed"
    assert reader.executed[-1] is step
    return new.mm_features


def features_of(*items: MultiModalKwargsItem | None) -> list[MultiModalFeatureSpec]:
    return make_request(items=items).mm_features or []


def test_references_become_the_tensors_that_were_written(
    reader: FakeArenaReader, cache: ArenaProcessorCache
) -> None:
    pixels = torch.rand(20, 30).to(torch.bfloat16)
    (sent,) = features_of(cache.store(make_item(pixels)))
    (seen,) = execute(reader, sent)
    assert seen.data == make_item(pixels)
    assert (seen.identifier, seen.mm_position) == (sent.identifier, sent.mm_position)


def test_the_tensors_lie_within_the_mapping(
    reader: FakeArenaReader, cache: ArenaProcessorCache, arena: Arena
) -> None:
    (sent,) = features_of(cache.store(make_item(1.0)))
    (one,), (other,) = execute(reader, sent), execute(reader, sent)
    assert one.data is not None and other.data is not None
    address = one.data["pixel_values"].data.data_ptr()
    assert address == other.data["pixel_values"].data.data_ptr()
    ranges = [
        [int(end, 16) for end in line.split()[0].split("-")]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if arena.id.name in line
    ]
    assert any(start <= address < end for start, end in ranges)


def test_what_the_model_writes_stays_in_its_process(
    reader: FakeArenaReader, cache: ArenaProcessorCache, arena: Arena
) -> None:
    other = make_reader()
    assert other.attach_arena(arena.id.name, arena.id.nonce) == ""
    (sent,) = features_of(cache.store(make_item(1.0)))
    (seen,) = execute(reader, sent)
    assert seen.data is not None
    seen.data["pixel_values"].data.fill_(9.0)
    (elsewhere,) = execute(other, sent)
    assert elsewhere.data == make_item(1.0)
    other.detach_arena(arena.id.name)


def test_what_the_model_wrote_is_gone_when_another_item_takes_that_place(
    reader: FakeArenaReader, cache: ArenaProcessorCache, arena: Arena
) -> None:
    places = []
    for value in (1.0, 2.0):
        (sent,) = features_of(cache.store(make_item(value)))
        (seen,) = execute(reader, sent)
        assert seen.data is not None
        assert seen.data == make_item(value)
        places.append(seen.data["pixel_values"].data.data_ptr())
        seen.data["pixel_values"].data.fill_(9.0)
        del sent, seen
        arena.drop_unleased()
    assert places[0] == places[1]


def test_items_that_hold_their_tensors_are_left_alone(reader: FakeArenaReader) -> None:
    whole, covered = features_of(make_item(1.0), None)
    assert execute(reader, whole, covered) == [whole, covered]


def test_an_item_stripped_to_its_cpu_fields_is_left_alone(
    reader: FakeArenaReader, cache: ArenaProcessorCache
) -> None:
    features = features_of(cache.store(make_item(1.0)))
    (stripped,) = strip_covered_mm_data(features, 100, uses_mrope=True)
    (seen,) = execute(reader, stripped)
    assert seen.data is not None
    assert list(seen.data) == ["image_grid_thw"]


def test_a_broken_promise_is_no_answer(
    reader: FakeArenaReader, cache: ArenaProcessorCache, arena: Arena
) -> None:
    sent = features_of(MultiModalKwargsItem(dict(cache.store(make_item(1.0)))))
    arena.drop_unleased()
    with pytest.raises(StaleRef):
        execute(reader, *sent)
    assert reader.executed == []


def test_an_arena_is_mapped_once_however_often_it_is_asked_for(
    reader: FakeArenaReader, arena: Arena
) -> None:
    before, view = handles_on(arena), reader._arenas[arena.id.name]
    assert reader.attach_arena(arena.id.name, arena.id.nonce) == ""
    assert handles_on(arena) == before
    assert reader._arenas[arena.id.name] is view


@pytest.mark.parametrize(
    ("name", "nonce", "reason"),
    [
        ("foveal-1-2-ab", b"n" * 16, "ArenaGone: cannot open"),
        ("../passwd", b"n" * 16, "BadMessage: "),
        (None, b"n" * 16, "ArenaGone: "),
    ],
)
def test_what_cannot_be_mapped_is_told_with_the_reason(
    reader: FakeArenaReader, arena: Arena, name: str | None, nonce: bytes, reason: str
) -> None:
    assert reader.attach_arena(name or arena.id.name, nonce).startswith(reason)
    # What was mapped before still is.
    assert list(reader._arenas) == [arena.id.name]


def test_detaching_unmaps_and_may_be_repeated(
    reader: FakeArenaReader, arena: Arena, cache: ArenaProcessorCache
) -> None:
    reader.detach_arena(arena.id.name)
    reader.detach_arena(arena.id.name)
    assert handles_on(arena) == 2
    with pytest.raises(KeyError):
        execute(reader, *features_of(cache.store(make_item(1.0))))
