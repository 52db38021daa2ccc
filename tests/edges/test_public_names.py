"""The packages have common names: what is imported must be ours."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("package", ["configs", "frontend", "transfer", "workers"])
def test_a_package_is_the_one_in_this_repository(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__file__ is not None
    assert Path(module.__file__).is_relative_to(ROOT)


@pytest.mark.parametrize(
    "name",
    ["workers.arena_cpu_worker.ArenaCPUWorker", "workers.arena_gpu_worker.ArenaGPUWorker"],
)
def test_the_worker_classes_are_where_vllm_is_told_to_find_them(name: str) -> None:
    from workers.engine_args import WORKER_CLASSES

    assert name in WORKER_CLASSES.values()
    module, _, _ = name.rpartition(".")
    assert (ROOT / Path(*module.split("."))).with_suffix(".py").exists()
