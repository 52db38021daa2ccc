"""A worker's part in the encoder outputs of its host."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from configs.flags import BadSetting
from configs.schema import WorkerConfig
from tests.fakes import FakeWorker, make_item, make_request, within
from tests.workers.lines import Line
from transfer.embeddings.home import EmbeddingHome
from transfer.embeddings.store import EmbeddingStore
from transfer.messages import (
    AbortRequests,
    Call,
    CallResult,
    LoadReport,
    Released,
    TensorsMissing,
)
from transfer.pack import lacks_tensors
from transfer.payload import encode_payload
from workers import embedding_cache
from workers.embedding_cache import (
    REPEAT_SECONDS,
    HostEmbeddings,
    connector_config,
    model_key,
    open_embeddings,
)

pytestmark = pytest.mark.anyio

OUTPUT = torch.ones(4, 8)


@pytest.fixture
def worker_settings(embeddings: HostEmbeddings) -> dict[str, Any]:
    return {"embeddings": embeddings}


def picture(line: Line, number: float = 1.0) -> tuple[Any, str]:
    item = line.cache.store(make_item(number))
    return item, f"image-{item.identity}"


class TestARequestWhosePixelsAreElsewhere:
    async def test_needs_none_where_the_output_is(
        self, worker: FakeWorker, line: Line, store: EmbeddingStore
    ) -> None:
        await line.greet(transfer="inline")
        item, identifier = picture(line)
        store.save(identifier, OUTPUT)
        line.add(make_request("r", items=[item]))
        request = await within(worker.engine.added.get())
        [feature] = request.mm_features or ()
        assert feature.data is not None
        assert lacks_tensors(feature.data)
        assert torch.equal(feature.data["image_grid_thw"].data, torch.tensor([1, 2, 4]))
        assert (await line.hear_output()).request_id == "r"

    async def test_is_sent_them_where_it_is_not(self, worker: FakeWorker, line: Line) -> None:
        await line.greet(transfer="inline")
        item, _ = picture(line)
        line.add(make_request("r", items=[item]))
        missing, _ = await line.hear(TensorsMissing)
        assert missing.request_id == "r"
        assert worker.engine.added.empty()

    async def test_is_sent_all_where_one_output_is_missing(
        self, worker: FakeWorker, line: Line, store: EmbeddingStore
    ) -> None:
        await line.greet(transfer="inline")
        known, identifier = picture(line)
        other, _ = picture(line, 2.0)
        store.save(identifier, OUTPUT)
        line.add(make_request("r", items=[known, other]))
        await line.hear(TensorsMissing)

    async def test_is_sent_them_where_the_output_is_spoiled(
        self, line: Line, store: EmbeddingStore
    ) -> None:
        await line.greet(transfer="inline")
        item, identifier = picture(line)
        store.save(identifier, OUTPUT)
        path = store.directory / identifier
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
        line.add(make_request("r", items=[item]))
        await line.hear(TensorsMissing)

    async def test_leases_the_output_until_it_is_over(
        self, worker: FakeWorker, line: Line, tmp_path: Path, store: EmbeddingStore
    ) -> None:
        await line.greet(transfer="inline")
        worker.engine.stalled = True
        item, identifier = picture(line)
        store.save(identifier, OUTPUT)
        tight = EmbeddingStore(store.directory, "key", 700)
        line.add(make_request("r", items=[item]))
        await within(worker.engine.added.get())
        another = "image-" + "0" * 32
        assert not tight.save(another, OUTPUT)
        line.say(AbortRequests(["r"]))
        await line.hear(Released)
        assert tight.save(another, OUTPUT)


async def test_where_pixels_are_seen_their_references_stay(
    worker: FakeWorker, line: Line, store: EmbeddingStore
) -> None:
    assert (await line.greet()).transfer == "shm"
    item, identifier = picture(line)
    store.save(identifier, OUTPUT)
    line.add(make_request("r", items=[item]))
    await within(worker.engine.added.get())
    assert torch.equal(worker.engine.pixels["r"][0], torch.full((8, 100), 1.0))


@pytest.mark.parametrize(
    ("method", "arguments", "left"),
    [
        ("reset_prefix_cache", [], 1),
        ("reset_encoder_cache", [], 0),
        # Weights are replaced between these and resume_scheduler, or wake_up.
        ("pause_scheduler", ["abort", True], 0),
        ("pause_scheduler", [], 0),
        ("pause_scheduler", ["keep", False], 1),
        ("sleep", [2, "abort"], 0),
        ("sleep", [0, "abort"], 1),
    ],
)
async def test_weights_that_may_change_empty_it(
    worker: FakeWorker, line: Line, store: EmbeddingStore, method: str,
    arguments: list[Any], left: int,
) -> None:
    await line.greet()
    store.save("image-" + "0" * 32, OUTPUT)
    line.say(Call(1, method), encode_payload(arguments))
    result, _ = await line.hear(CallResult)
    assert result.error is None
    assert len(store.identifiers()) == left
    if method != "reset_prefix_cache":
        assert worker.inbox.encoder_resets == 1 - left


async def test_frontends_are_told_what_is_there(
    worker: FakeWorker, line: Line, store: EmbeddingStore, embeddings: HostEmbeddings
) -> None:
    said: asyncio.Queue[Any] = asyncio.Queue()
    worker.kv_publisher.publish = said.put_nowait  # type: ignore[method-assign]
    store.save("image-" + "0" * 32, OUTPUT)

    async def next_told() -> list[str]:
        while True:
            report = await said.get()
            if isinstance(report, LoadReport) and report.embeddings is not None:
                assert report.embedding_cache == embeddings.name != ""
                return report.embeddings

    assert await within(next_told()) == ["image-" + "0" * 32]
    store.clear()
    while await within(next_told()) != []:
        pass
    assert await within(next_told(), REPEAT_SECONDS + 20) == []


def test_a_long_list_is_made_less_often(
    store: EmbeddingStore, embeddings: HostEmbeddings, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(embedding_cache, "time", SimpleNamespace(monotonic=lambda: now))
    identifiers = store.identifiers

    def slowly() -> list[str]:
        nonlocal now
        now += 0.5
        return identifiers()

    monkeypatch.setattr(store, "identifiers", slowly)
    assert embeddings.news() == []
    began = now
    store.save("image-" + "0" * 32, OUTPUT)
    while (told := embeddings.news()) is None:
        now += 0.1
    assert told == ["image-" + "0" * 32]
    assert now - began >= 0.5 * 19


def test_two_workers_of_a_host_say_the_same_name(
    store: EmbeddingStore, embeddings: HostEmbeddings, tmp_path: Path
) -> None:
    same = EmbeddingStore(store.directory, "key", 1)
    other = EmbeddingStore(tmp_path / "others", "key", 1)
    home = EmbeddingHome(bytes(32), "ns", tmp_path)
    assert HostEmbeddings(home, same).name == embeddings.name
    assert HostEmbeddings(home, other).name != embeddings.name


def config_of(**changes: Any) -> Any:
    model: dict[str, Any] = {
        "model": "m", "revision": None, "dtype": torch.float32, "quantization": None,
        "hf_config": SimpleNamespace(), "hf_overrides": {},
        "supports_multimodal_inputs": True, "is_encoder_decoder": False,
    }
    multimodal: dict[str, Any] = {
        "compute_hash": lambda: "h", "mm_processor_kwargs": None, "video_pruning_rate": None
    }
    for name, value in changes.items():
        (multimodal if name in multimodal else model)[name] = value
    model["multimodal_config"] = SimpleNamespace(**multimodal)
    return SimpleNamespace(
        model_config=SimpleNamespace(**model),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        load_config=SimpleNamespace(load_format="auto"),
        device_config=SimpleNamespace(device_type="cpu"),
        ec_transfer_config=connector_config(
            WorkerConfig(multimodal_embedding_cache_capacity_gb=1)
        ),
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "n"},
        {"revision": "abc"},
        {"dtype": torch.bfloat16},
        {"quantization": "fp8"},
        {"hf_config": SimpleNamespace(_commit_hash="abc")},
        {"hf_overrides": {"vision_config": {"depth": 3}}},
        {"compute_hash": lambda: "i"},
        {"mm_processor_kwargs": {"max_pixels": 3136}},
        {"video_pruning_rate": 0.5},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_another_model_has_outputs_of_its_own(changes: dict[str, Any]) -> None:
    assert model_key(config_of()) == model_key(config_of())
    assert model_key(config_of(**changes)) != model_key(config_of())


def test_another_checkpoint_in_the_same_place_is_another_model(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"1")
    before = model_key(config_of(model=str(tmp_path)))
    assert model_key(config_of(model=str(tmp_path))) == before
    weights.write_bytes(b"12")
    assert model_key(config_of(model=str(tmp_path))) != before


def test_without_capacity_nothing_is_made() -> None:
    assert connector_config(WorkerConfig()) is None


@pytest.mark.parametrize(
    "changes", [{"supports_multimodal_inputs": False}, {"is_encoder_decoder": True}]
)
def test_a_model_without_a_vision_encoder_has_no_cache(
    changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(**changes)
    settings = WorkerConfig(multimodal_embedding_cache_capacity_gb=1)
    assert open_embeddings(settings, config, bytes(32)) is None
    assert config.ec_transfer_config is None
    assert "no embedding cache" in caplog.text


def test_an_encode_worker_must_have_one() -> None:
    with pytest.raises(BadSetting, match="--role encode needs"):
        connector_config(WorkerConfig(role="encode"))
    settings = WorkerConfig(role="encode", multimodal_embedding_cache_capacity_gb=1)
    config = config_of(supports_multimodal_inputs=False)
    with pytest.raises(BadSetting, match="no embedding cache: the model takes text only"):
        open_embeddings(settings, config, bytes(32))
    connector = connector_config(settings)
    assert connector is not None
    assert connector.is_encode_only


def test_the_engine_is_told_where_it_is() -> None:
    config = config_of()
    settings = WorkerConfig(multimodal_embedding_cache_capacity_gb=0.5, namespace="test-ec")
    embeddings = open_embeddings(settings, config, bytes(32))
    assert embeddings is not None
    extra = config.ec_transfer_config.ec_connector_extra_config
    try:
        assert Path(extra["directory"]).name == extra["model_key"] == model_key(config)
        assert extra["capacity_bytes"] == 1 << 29
    finally:
        embeddings.leave()
    assert not Path(extra["directory"]).parent.exists()
