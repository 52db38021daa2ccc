"""A worker reads outputs of another process into its host's cache: real agents, over TCP."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.fakes import PATIENCE, FakeWorker, eventually
from tests.fakes_nixl import cpu_seconds
from tests.nixl_owner import Owner
from tests.workers.lines import Line
from transfer.embeddings.store import EmbeddingStore
from transfer.messages import (
    Call,
    CallResult,
    EmbeddingOffer,
    EmbeddingPulled,
    PullEmbedding,
)
from transfer.payload import encode_payload
from transfer.registry import Registry
from transfer.tensor_ref import ArenaId
from workers import embedding_pulls
from workers.embedding_cache import HostEmbeddings
from workers.embedding_pulls import EmbeddingPulls

pytest.importorskip("nixl", reason="NIXL is not installed, so NOT TESTED")
pytestmark = [pytest.mark.anyio, pytest.mark.nixl, pytest.mark.usefixtures("over_tcp")]

OUTPUT = torch.rand(40, 64)


def named(number: int) -> str:
    return f"image-{number:032x}"


@pytest.fixture(scope="module")
def lasting(over_tcp: None) -> Iterator[Owner]:
    with Owner() as owner:
        yield owner


@pytest.fixture
def owner(lasting: Owner) -> Owner:
    """The encode worker of another host, which works for whoever reads."""
    lasting.do("progress_for", "tests", 60.0)
    return lasting


@pytest.fixture
def doomed(over_tcp: None) -> Iterator[Owner]:
    with Owner() as owner:
        owner.do("progress_for", "tests", 60.0)
        yield owner


@pytest.fixture
def store_bytes() -> int:
    return 1 << 15


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[EmbeddingStore]:
    """The cache of the other host."""
    store = EmbeddingStore(tmp_path / "elsewhere", "key", 1 << 24)
    yield store
    store.close()


@pytest.fixture
def worker_settings(embeddings: HostEmbeddings) -> dict[str, Any]:
    return {"embeddings": embeddings, "cache_gib": 1 / 256, "transfer_timeout": PATIENCE}


@pytest.fixture
async def line(line: Line) -> Line:
    await line.greet()
    return line


def offer(
    owner: Owner, elsewhere: EmbeddingStore, number: int, output: torch.Tensor = OUTPUT
) -> EmbeddingOffer:
    elsewhere.save(named(number), output)
    contents = (elsewhere.directory / named(number)).read_bytes()
    return EmbeddingOffer(owner.remote, owner.put(contents))


async def pull(line: Line, offered: EmbeddingOffer, number: int) -> str:
    """Returns why it failed; empty if it did not."""
    line.say(PullEmbedding(number, named(number), offered))
    pulled, _ = await line.hear(EmbeddingPulled)
    assert pulled.move_id == number
    return pulled.error


def pulls_of(worker: FakeWorker) -> EmbeddingPulls:
    assert worker.inbox._pulls is not None
    return worker.inbox._pulls


def bytes_used(worker: FakeWorker) -> int:
    assert worker.nixl._arena is not None
    return worker.nixl._arena.stats().bytes_used


async def test_what_is_pulled_is_what_was_encoded_bit_for_bit(
    worker: FakeWorker, line: Line, owner: Owner, store: EmbeddingStore,
    elsewhere: EmbeddingStore,
) -> None:
    bits = torch.randint(0, 256, (5, 3, 8), dtype=torch.uint8)
    assert await pull(line, offer(owner, elsewhere, 1, bits.view(torch.bfloat16)), 1) == ""
    loaded = store.load(named(1))
    assert loaded is not None
    assert (loaded.dtype, loaded.shape) == (torch.bfloat16, (5, 3, 4))
    assert torch.equal(loaded.view(torch.uint8), bits)
    assert bytes_used(worker) == 0
    assert len(pulls_of(worker)) == 0


async def test_several_are_pulled_at_once_and_one_that_is_here_is_not(
    worker: FakeWorker, line: Line, owner: Owner, store: EmbeddingStore,
    elsewhere: EmbeddingStore,
) -> None:
    store.save(named(0), OUTPUT)
    nowhere = offer(owner, elsewhere, 1)
    entry = msgspec.structs.replace(nowhere.entry, offset=1 << 50)
    assert await pull(line, EmbeddingOffer(nowhere.arena, entry), 0) == ""
    offers = {number: offer(owner, elsewhere, number, OUTPUT[:4]) for number in range(2, 8)}
    for number, offered in offers.items():
        line.say(PullEmbedding(number, named(number), offered))
    said = [(await line.hear(EmbeddingPulled))[0] for _ in offers]
    assert {each.move_id: each.error for each in said} == dict.fromkeys(offers, "")
    assert set(store.identifiers()) == {named(0), *map(named, offers)}
    assert len(pulls_of(worker)._connected) == 1


async def test_nobody_uses_the_processor_between_pulls(
    line: Line, owner: Owner, elsewhere: EmbeddingStore
) -> None:
    assert await pull(line, offer(owner, elsewhere, 1), 1) == ""
    assert cpu_seconds(1.0) < 0.05


async def test_what_is_of_another_model_or_image_or_spoiled_is_refused(
    line: Line, owner: Owner, store: EmbeddingStore, elsewhere: EmbeddingStore, tmp_path: Path
) -> None:
    foreign = EmbeddingStore(tmp_path / "foreign", "another", 1 << 22)
    assert "of model another" in await pull(line, offer(owner, foreign, 1), 1)
    assert named(3) in await pull(line, offer(owner, elsewhere, 3), 2)
    contents = bytearray((elsewhere.directory / named(3)).read_bytes())
    contents[-1] ^= 1
    spoiled = EmbeddingOffer(owner.remote, owner.put(bytes(contents)))
    assert "have changed" in await pull(line, spoiled, 3)
    cut = EmbeddingOffer(owner.remote, owner.put(bytes(contents[:100])))
    assert "no header" in await pull(line, cut, 3)
    assert store.identifiers() == []
    assert await pull(line, offer(owner, elsewhere, 4), 4) == ""


async def test_offers_that_make_no_sense_are_refused(
    worker: FakeWorker, line: Line, owner: Owner, elsewhere: EmbeddingStore
) -> None:
    good = offer(owner, elsewhere, 1)
    for changes in (
        {"offset": 1 << 50}, {"offset": 64}, {"generation": 999}, {"identity": b"x" * 16},
        {"nbytes": 1 << 40}, {"nbytes": -1}, {"arena": "foveal-1-2-ab"},
    ):
        entry = msgspec.structs.replace(good.entry, **changes)
        assert await pull(line, EmbeddingOffer(good.arena, entry), 1)
    for changes in (
        {"metadata": b"nothing"}, {"address": good.arena.address + (1 << 40)},
        {"arena": ArenaId("foveal-1-2-ab", b"n" * 16)},
    ):
        arena = msgspec.structs.replace(good.arena, **changes)
        assert await pull(line, EmbeddingOffer(arena, good.entry), 1)
    assert await pull(line, good, 1) == ""
    await eventually(lambda: bytes_used(worker) == 0)


async def test_what_has_been_let_go_is_not_taken_for_what_it_was(
    line: Line, owner: Owner, store: EmbeddingStore, elsewhere: EmbeddingStore
) -> None:
    gone = offer(owner, elsewhere, 1)
    owner.do("forget")
    offer(owner, elsewhere, 2, OUTPUT + 1)  # in its place
    assert "no longer there" in await pull(line, gone, 1)
    assert store.identifiers() == []


async def test_what_is_refused_takes_no_room_at_once(
    worker: FakeWorker, line: Line, owner: Owner, elsewhere: EmbeddingStore
) -> None:
    offered = offer(owner, elsewhere, 1)
    gc.collect()
    gc.disable()
    try:
        assert named(1) in await pull(line, offered, 2)  # it is another image
        assert bytes_used(worker) == 0
    finally:
        gc.enable()


async def test_what_was_on_its_way_when_outputs_were_to_be_forgotten_is_not_kept(
    worker: FakeWorker, line: Line, owner: Owner, store: EmbeddingStore,
    elsewhere: EmbeddingStore,
) -> None:
    assert await pull(line, offer(owner, elsewhere, 1), 1) == ""
    owner.do("progress_for", "tests", 0.0)
    line.say(PullEmbedding(2, named(2), offer(owner, elsewhere, 2)))
    await eventually(lambda: len(pulls_of(worker)) == 1)
    line.say(Call(1, "reset_encoder_cache"), encode_payload([]))
    result, _ = await line.hear(CallResult)
    assert result.error is None
    owner.do("progress_for", "tests", 60.0)
    pulled, _ = await line.hear(EmbeddingPulled)
    assert "forgotten" in pulled.error
    assert store.identifiers() == []


async def test_no_room_is_said_and_costs_nobody(
    worker: FakeWorker, line: Line, owner: Owner, store: EmbeddingStore,
    elsewhere: EmbeddingStore,
) -> None:
    assert "no room" in await pull(line, offer(owner, elsewhere, 1, torch.rand(150, 64)), 1)
    large = offer(owner, elsewhere, 2, torch.rand(20_000, 64))
    assert "do not fit" in await pull(line, large, 2)  # not even in the worker's arena
    store.save(named(3), torch.rand(100, 64))
    lease = store.lease(named(3))
    assert lease is not None
    offered = offer(owner, elsewhere, 4)
    assert "no room" in await pull(line, offered, 4)
    lease.release()
    assert await pull(line, offered, 4) == ""
    assert bytes_used(worker) == 0


async def test_one_that_hangs_is_given_up_and_kept_when_it_comes(
    worker: FakeWorker, line: Line, owner: Owner, store: EmbeddingStore,
    elsewhere: EmbeddingStore,
) -> None:
    assert await pull(line, offer(owner, elsewhere, 1), 1) == ""
    owner.do("progress_for", "tests", 0.0)
    worker.nixl.timeout = 0.3
    assert "within 0.3 s" in await pull(line, offer(owner, elsewhere, 2), 2)
    assert len(pulls_of(worker)) == 1
    owner.do("progress_for", "tests", 60.0)
    await eventually(lambda: named(2) in store.identifiers())
    await eventually(lambda: len(pulls_of(worker)) == 0 and bytes_used(worker) == 0)


async def test_one_that_is_gone_is_given_up_and_its_successor_is_read(
    worker: FakeWorker, line: Line, owner: Owner, doomed: Owner, elsewhere: EmbeddingStore
) -> None:
    assert await pull(line, offer(doomed, elsewhere, 1), 1) == ""
    offered = offer(doomed, elsewhere, 2)
    doomed.kill()
    worker.nixl.timeout = 1.0
    assert await pull(line, offered, 2)
    worker.nixl.timeout = PATIENCE
    assert await pull(line, offer(owner, elsewhere, 3), 3) == ""
    await eventually(lambda: len(pulls_of(worker)) == 0 and bytes_used(worker) == 0)


async def test_only_the_latest_owners_stay_connected(
    worker: FakeWorker, line: Line, owner: Owner, doomed: Owner, elsewhere: EmbeddingStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(embedding_pulls, "MOST_OWNERS", 1)
    for number, each in enumerate((owner, doomed, owner)):
        assert await pull(line, offer(each, elsewhere, number), number) == ""
    assert list(pulls_of(worker)._connected) == [owner.remote.agent]
    reader = worker.nixl._reader
    await eventually(lambda: reader and reader._known == {owner.remote.agent})


async def test_without_nixl_it_says_so(
    worker: FakeWorker, line: Line, owner: Owner, elsewhere: EmbeddingStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    for number in range(2):
        assert "nixl" in await pull(line, offer(owner, elsewhere, number), number)
    assert len(pulls_of(worker)) == 0


async def test_a_worker_that_ends_meanwhile_ends(
    registry: Registry, worker_settings: dict[str, Any], doomed: Owner,
    elsewhere: EmbeddingStore,
) -> None:
    async with FakeWorker(registry, **worker_settings) as worker, Line(worker) as line:
        await line.greet()
        assert await pull(line, offer(doomed, elsewhere, 1), 1) == ""
        offered = offer(doomed, elsewhere, 2)
        doomed.stop()
        line.say(PullEmbedding(2, named(2), offered))
        await eventually(lambda: len(pulls_of(worker)) == 1)
    assert len(pulls_of(worker)) == 0
