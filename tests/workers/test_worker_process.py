"""What a worker refuses before it loads anything; the rest is in ``tests/e2e``."""

from __future__ import annotations

import gc
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.schema import WorkerConfig
from transfer.errors import BadKeys, TransferError
from transfer.registry import Registry
from workers import worker_process
from workers.mock.process import run_mock_workers
from workers.worker_process import run_worker

Run = Callable[[WorkerConfig, Namespace], int]


@pytest.mark.parametrize("run", [run_worker, run_mock_workers])
def test_no_worker_listens_beyond_its_host_without_keys(run: Run, tmp_path: Path) -> None:
    (tmp_path / "r").mkdir(mode=0o700)
    settings = WorkerConfig(registry=tmp_path / "r", host="0.0.0.0", port=0)
    with pytest.raises(TransferError, match="--insecure"):
        run(settings, Namespace())
    assert list((tmp_path / "r").glob("*/*.d")) == []


@pytest.mark.parametrize("run", [run_worker, run_mock_workers])
def test_no_worker_starts_with_keys_that_are_none(run: Run, tmp_path: Path) -> None:
    (tmp_path / "r").mkdir(mode=0o700)
    settings = WorkerConfig(registry=tmp_path / "r", secure_keys=tmp_path / "none")
    with pytest.raises(BadKeys, match="make_keys"):
        run(settings, Namespace())


def test_the_collector_of_a_worker_leaves_alone_what_was_loaded(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SimpleNamespace(shutdown_timeout=0)
    engine = SimpleNamespace(shutdown=lambda timeout: None)

    async def serve(*_: object) -> int:
        return gc.get_freeze_count()

    stands_in = {
        "engine_config": lambda *_: config, "open_embeddings": lambda *_: None,
        "_start_engine": lambda *_: engine, "facts_of": lambda *_: None, "_serve": serve,
    }
    for name, replacement in stands_in.items():
        monkeypatch.setattr(worker_process, name, replacement)
    before = gc.get_freeze_count()
    try:
        frozen = run_worker(WorkerConfig(registry=registry.path.parent), Namespace())
    finally:
        gc.unfreeze()
    assert frozen > before + 10_000
