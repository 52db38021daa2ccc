"""Who is connected and whose a request is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
)

from frontend.arena_cache import ArenaProcessorCache
from tests.fakes import make_item, make_request, within
from transfer.arena import Arena
from transfer.arena_view import ArenaView
from transfer.errors import ArenaGone, BadMessage, StaleRef
from transfer.messages import FrontendShare
from transfer.pack import REFERENCE_KEY
from workers.frontends import Frontend, Frontends


@pytest.fixture
def frontend(arena: Arena) -> Iterator[Frontend]:
    """One that shares memory with this worker."""
    with ArenaView(arena.id) as view:
        yield Frontend("f", 0.0, arena=arena.id, view=view)


def test_a_request_belongs_to_who_began_it() -> None:
    frontends = Frontends()
    one, two = frontends.connect("one", 1.0), frontends.connect("two", 2.0)
    assert frontends.begin(one, "r")
    assert not frontends.begin(two, "r")
    assert frontends.owner("r") is one
    assert frontends.end("r") is one
    assert frontends.end("r") is None
    assert frontends.owner("r") is None
    assert frontends.begin(two, "r")


def test_charges_go_with_their_requests() -> None:
    frontends = Frontends()
    one, two = frontends.connect("one", 1.0), frontends.connect("two", 2.0)
    frontends.begin(one, "r")
    frontends.begin(two, "s")
    frontends.charge("r", 100, 4)
    frontends.charge("s", 30, 2)
    frontends.charge("never begun", 1, 1)
    frontends.computed("r")
    assert frontends.shares() == {
        "one": FrontendShare(1, 0, 4),
        "two": FrontendShare(1, 30, 2),
    }
    frontends.end("r")
    frontends.disconnect("two")
    assert frontends.shares() == {}
    assert not one.charges
    assert not two.charges


def test_more_input_for_a_request_that_streams_in_is_of_the_same_request() -> None:
    frontends = Frontends()
    one = frontends.connect("one", 1.0)
    assert frontends.begin(one, "r", streams=True)
    assert frontends.begin(one, "r")
    assert frontends.disconnect("one") == ["r"]


def test_a_second_request_of_one_id_is_refused_to_its_own_frontend_too() -> None:
    frontends = Frontends()
    one = frontends.connect("one", 1.0)
    assert frontends.begin(one, "r")
    assert not frontends.begin(one, "r")
    assert not frontends.begin(one, "r", streams=True)


def test_who_connects_again_is_still_the_same() -> None:
    frontends = Frontends()
    assert frontends.connect("one", 1.0) is frontends.connect("one", 2.0)
    assert frontends.names() == ["one"]


def test_who_leaves_leaves_its_running_requests_and_no_others() -> None:
    frontends = Frontends()
    one, two = frontends.connect("one", 1.0), frontends.connect("two", 2.0)
    for request_id in ("a", "b", "c"):
        frontends.begin(one, request_id)
    frontends.begin(two, "d")
    frontends.end("b")
    assert sorted(frontends.disconnect("one")) == ["a", "c"]
    assert frontends.get("one") is None
    assert [frontends.owner(r) for r in "abcd"] == [None, None, None, two]


def test_the_silent_are_those_not_heard_of_since() -> None:
    frontends = Frontends()
    frontends.connect("old", 1.0)
    frontends.connect("new", 5.0)
    assert frontends.silent_since(5.0) == ["old"]


def test_good_references_pass(frontend: Frontend, cache: ArenaProcessorCache) -> None:
    request = make_request(items=[cache.store(make_item(1.0)), make_item(2.0), None])
    frontend.check_references(request)
    frontend.check_references(make_request())


def test_replaced_bytes_are_noticed(
    frontend: Frontend, cache: ArenaProcessorCache, arena: Arena
) -> None:
    item = cache.store(make_item(1.0))
    request = make_request(items=[MultiModalKwargsItem(dict(item))])
    frontend.check_references(request)
    del item
    arena.drop_unleased()
    with pytest.raises(StaleRef):
        frontend.check_references(request)


def test_a_segment_that_is_not_mapped_here_is_noticed(cache: ArenaProcessorCache) -> None:
    request = make_request(items=[cache.store(make_item(1.0))])
    arena = cache._arena
    assert arena is not None
    with pytest.raises(ArenaGone):
        Frontend("f", 0.0, arena=arena.id).check_references(request)


def test_only_the_senders_own_arena_may_be_referred_to(cache: ArenaProcessorCache) -> None:
    request = make_request(items=[cache.store(make_item(1.0))])
    with Arena(1 << 16, populate=False) as other, ArenaView(other.id) as view:
        with pytest.raises(BadMessage, match="not the sender's"):
            Frontend("f", 0.0, arena=other.id, view=view).check_references(request)
        with pytest.raises(BadMessage, match="not the sender's"):
            Frontend("f", 0.0).check_references(request)


@pytest.mark.parametrize("data", [torch.zeros(3), [8, 1], [1], 7])
def test_a_reference_that_is_none_is_a_bad_message(frontend: Frontend, data: object) -> None:
    elem = MultiModalFieldElem(data, MultiModalBatchedField())  # type: ignore[arg-type]
    request = make_request(items=[MultiModalKwargsItem({REFERENCE_KEY: elem})])
    with pytest.raises(BadMessage):
        frontend.check_references(request)


def test_parts_of_a_request_are_counted() -> None:
    frontends = Frontends()
    one = frontends.connect("one", 1.0)
    assert one.comes_next("r", 0) and not one.comes_next("r", 1)
    for part in range(3):
        assert one.comes_next("r", part)
        assert frontends.begin(one, "r", streams=part < 2)
    assert not one.comes_next("r", 0)
    frontends.end("r")
    assert one.comes_next("r", 0) and not one.comes_next("r", 3)


def test_a_part_that_did_not_reach_the_engine_comes_again_and_those_behind_it() -> None:
    frontends = Frontends()
    one, two = frontends.connect("one", 1.0), frontends.connect("two", 2.0)
    for _ in range(4):
        frontends.begin(one, "r", streams=True)
    frontends.take_back(two, "r", 1)
    assert one.comes_next("r", 4)
    frontends.take_back(one, "r", 2)
    frontends.take_back(one, "r", 3)
    assert one.comes_next("r", 2)
    frontends.take_back(one, "r", 0)
    assert frontends.owner("r") is None


def test_what_a_request_leases_ends_with_it_but_not_with_its_frontend(arena: Arena) -> None:
    def lease_for(frontend: Frontend, request_id: str) -> None:
        lease = arena.reserve(10).seal(request_id.encode() * 16)
        frontend.leases.setdefault(request_id, []).append(lease)

    frontends = Frontends()
    one = frontends.connect("one", 1.0)
    for request_id in ("r", "s"):
        frontends.begin(one, request_id)
        lease_for(one, request_id)
    frontends.end("r")
    assert arena.stats().leased_entries == 1
    assert frontends.disconnect("one") == ["s"]
    assert arena.stats().leased_entries == 1
    del one
    assert arena.stats().leased_entries == 0


def test_a_reference_that_does_not_fit_its_item_is_refused(
    frontend: Frontend, cache: ArenaProcessorCache
) -> None:
    item = cache.store(make_item(1.0))
    other = MultiModalKwargsItem({**item, "pixel_values": make_item(1.0)["pixel_values"]})
    with pytest.raises(BadMessage, match="did not move"):
        frontend.check_references(make_request(items=[other]))


async def until_idle(frontends: Frontends) -> bool:
    try:
        await within(frontends.until_idle(), 0.02)
    except TimeoutError:
        return False
    return True


@pytest.mark.anyio
async def test_it_is_idle_when_no_frontend_has_requests() -> None:
    frontends = Frontends()
    one, two = frontends.connect("one", 1.0), frontends.connect("two", 1.0)
    assert await until_idle(frontends)
    frontends.begin(one, "r")
    frontends.begin(two, "s")
    frontends.end("r")
    assert frontends.num_requests == 1
    assert not await until_idle(frontends)
    frontends.disconnect("two")
    assert await until_idle(frontends)
    frontends.begin(one, "t")
    frontends.take_back(one, "t", 0)
    assert await until_idle(frontends)
