"""An encode worker makes outputs readable for other hosts: a real agent, over TCP."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes import FakeWorker, eventually, make_facts, within
from tests.fakes_nixl import PATIENCE, cpu_seconds
from tests.workers.lines import Line
from transfer.arena import Arena
from transfer.embeddings.store import EmbeddingStore
from transfer.messages import (
    Bye,
    Call,
    CallResult,
    EmbeddingExported,
    EmbeddingOffer,
    ExportEmbedding,
    PullEmbedding,
    ReleaseEmbedding,
)
from transfer.nixl.export import ArenaExport
from transfer.nixl.reader import ArenaReader
from transfer.payload import encode_payload
from transfer.registry import Registry
from workers import embedding_exports
from workers.embedding_cache import HostEmbeddings
from workers.embedding_exports import EmbeddingExports

pytest.importorskip("nixl", reason="NIXL is not installed, so NOT TESTED")
pytestmark = [pytest.mark.anyio, pytest.mark.nixl, pytest.mark.usefixtures("over_tcp")]

IDENTIFIER, OTHER = "image-" + "0" * 32, "image-" + "1" * 32
OUTPUT = torch.rand(40, 64)
CACHE_GIB = 1 / 1024
"""1 MiB."""


@pytest.fixture
def store_bytes() -> int:
    return 1 << 22


@pytest.fixture
def worker_settings(embeddings: HostEmbeddings) -> dict[str, Any]:
    facts = make_facts(role="encode")
    return {"facts": facts, "embeddings": embeddings, "cache_gib": CACHE_GIB}


@pytest.fixture
async def line(line: Line) -> Line:
    await line.greet()
    return line


def exports_of(worker: FakeWorker) -> EmbeddingExports:
    assert worker.inbox._exports is not None
    return worker.inbox._exports


def leased_by(worker: FakeWorker) -> int:
    arena = exports_of(worker)._arena
    assert arena is not None
    return arena.stats().leased_entries


async def ask(line: Line, move_id: int = 1, identifier: str = IDENTIFIER) -> EmbeddingExported:
    line.say(ExportEmbedding(move_id, identifier))
    exported, _ = await line.hear(EmbeddingExported)
    assert exported.move_id == move_id
    return exported


async def offered(
    line: Line, move_id: int = 1, identifier: str = IDENTIFIER
) -> EmbeddingOffer:
    exported = await ask(line, move_id, identifier)
    assert exported.offer is not None, exported.error
    return exported.offer


async def test_what_is_read_is_the_file_in_the_cache(
    line: Line, store: EmbeddingStore
) -> None:
    store.save(IDENTIFIER, OUTPUT)
    offer = await offered(line)
    with Arena(1 << 20, populate=False) as arena:
        reader = ArenaReader(arena)
        reader.start().result(PATIENCE)
        reader.connect(offer.arena).result(PATIENCE)
        read = reader.read(offer.arena, offer.entry).result(PATIENCE)
        assert bytes(read.memory) == (store.directory / IDENTIFIER).read_bytes()
        reader.close()


async def test_it_stays_until_it_is_let_go_and_nobody_works_after_that(
    worker: FakeWorker, line: Line, store: EmbeddingStore
) -> None:
    store.save(IDENTIFIER, OUTPUT)
    first, second = await offered(line, 1), await offered(line, 2)
    assert first == second  # copied once
    export = exports_of(worker)._export
    assert export is not None
    line.say(ReleaseEmbedding(1))
    await eventually(lambda: len(exports_of(worker)) == 1)
    assert leased_by(worker) == 1 and export.busy
    line.say(ReleaseEmbedding(2))
    line.say(ReleaseEmbedding(2))
    line.say(ReleaseEmbedding(77))
    await eventually(lambda: len(exports_of(worker)) == 0)
    assert leased_by(worker) == 0 and not export.busy
    assert cpu_seconds(1.0) < 0.05


@pytest.mark.parametrize("how", ["says goodbye", "comes anew", "says no more"])
async def test_it_is_let_go_when_the_frontend(
    worker: FakeWorker, line: Line, store: EmbeddingStore, how: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if how == "says no more":
        monkeypatch.setattr(embedding_exports, "LEASE_SECONDS", 0.1)
    store.save(IDENTIFIER, OUTPUT)
    await offered(line)
    if how == "says goodbye":
        line.say(Bye())
    elif how == "comes anew":
        with Arena(1 << 12, populate=False) as arena:
            await line.greet(arena=arena.id)
    await eventually(lambda: not len(exports_of(worker)) and leased_by(worker) == 0)


async def test_one_frontend_does_not_let_go_what_another_reads(
    worker: FakeWorker, line: Line, store: EmbeddingStore
) -> None:
    store.save(IDENTIFIER, OUTPUT)
    await offered(line)
    async with Line(worker, "frontend-2") as other:
        await other.greet()
        other.say(ReleaseEmbedding(1))
        await offered(other, 2)
        assert len(exports_of(worker)) == 2
        other.say(Bye())
        await eventually(lambda: len(exports_of(worker)) == 1)
    assert leased_by(worker) == 1


async def test_what_cannot_be_handed_over_is_said(
    line: Line, store: EmbeddingStore
) -> None:
    assert "not in the cache" in (await ask(line)).error
    assert "not in the cache" in (await ask(line, identifier="../lock")).error
    store.save(OTHER, torch.rand(400, 800))  # larger than the arena
    assert "do not fit" in (await ask(line, identifier=OTHER)).error
    store.save(IDENTIFIER, OUTPUT)
    path = store.directory / IDENTIFIER
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    assert "have changed" in (await ask(line)).error
    assert not path.exists()
    store.save(IDENTIFIER, OUTPUT)
    await offered(line)


async def test_another_output_of_the_same_image_is_another_entry(
    line: Line, store: EmbeddingStore
) -> None:
    store.save(IDENTIFIER, OUTPUT)
    before = await offered(line, 1)
    store.clear()  # new weights
    store.save(IDENTIFIER, OUTPUT + 1)
    assert (await offered(line, 2)).entry != before.entry


async def test_it_forgets_when_weights_may_change(line: Line, store: EmbeddingStore) -> None:
    store.save(IDENTIFIER, OUTPUT)
    line.say(Call(1, "reset_encoder_cache"), encode_payload([]))
    result, _ = await line.hear(CallResult)
    assert result.error is None
    assert store.identifiers() == []


async def test_without_nixl_it_says_so_once_and_each_who_asks_is_told(
    worker: FakeWorker, line: Line, store: EmbeddingStore, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    store.save(IDENTIFIER, OUTPUT)
    for move_id in (1, 2):
        assert "nixl" in (await ask(line, move_id)).error
    assert caplog.text.count("switched off") == 1
    assert len(exports_of(worker)) == 0 and exports_of(worker)._arena is None


async def test_an_agent_that_is_never_made_keeps_nobody_waiting(
    line: Line, store: EmbeddingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = threading.Event()

    def slowly(arena: Arena) -> ArenaExport:
        assert may_go_on.wait(PATIENCE)
        return ArenaExport(arena)

    monkeypatch.setattr(embedding_exports, "ArenaExport", slowly)
    monkeypatch.setattr(embedding_exports, "START_SECONDS", 0.1)
    store.save(IDENTIFIER, OUTPUT)
    try:
        assert "no agent" in (await ask(line)).error
        store.capacity = (store.directory / IDENTIFIER).stat().st_size
        assert store.save(OTHER, OUTPUT)  # the first is leased by nobody
    finally:
        may_go_on.set()
    monkeypatch.setattr(embedding_exports, "START_SECONDS", PATIENCE)
    await offered(line, 2, OTHER)


async def test_agents_are_made_only_where_they_are_asked_for(
    worker: FakeWorker, line: Line
) -> None:
    await ask(line)
    assert exports_of(worker)._making is None


async def test_only_encode_workers_are_asked(
    registry: Registry, embeddings: HostEmbeddings, store: EmbeddingStore,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store.save(IDENTIFIER, OUTPUT)
    async with FakeWorker(registry, embeddings=embeddings) as worker, Line(worker) as line:
        await line.greet()
        line.say(ExportEmbedding(1, IDENTIFIER))
        await eventually(lambda: "sent ExportEmbedding" in caplog.text)


async def test_an_encode_worker_pulls_nothing(
    worker: FakeWorker, line: Line, store: EmbeddingStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.save(IDENTIFIER, OUTPUT)
    line.say(PullEmbedding(1, IDENTIFIER, await offered(line)))
    await eventually(lambda: "sent PullEmbedding" in caplog.text)


async def test_its_end_takes_everything_along(
    registry: Registry, embeddings: HostEmbeddings, store: EmbeddingStore
) -> None:
    store.save(IDENTIFIER, OUTPUT)
    exports = EmbeddingExports(embeddings, CACHE_GIB)
    exported = await within(exports.answer("f", ExportEmbedding(1, IDENTIFIER)))
    assert exported.offer is not None
    path = Path("/dev/shm") / exported.offer.arena.arena.name
    assert path.exists()
    await within(exports.close())
    assert not path.exists() and not len(exports)
    assert (await exports.answer("f", ExportEmbedding(2, IDENTIFIER))).error
