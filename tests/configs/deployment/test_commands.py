"""From a deployment to what is started."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import pytest

from configs.deployment.commands import (
    drain_seconds,
    frontend_command,
    with_devices,
    worker_commands,
)
from configs.deployment.schema import Deployment

REGISTRY = Path("/r")


def deployment(**values: object) -> Deployment:
    return Deployment.model_validate({"model": "m", **values})


def pairs(arguments: list[str]) -> set[tuple[str, str]]:
    return set(pairwise(arguments))


def test_the_frontend_is_told_all_that_concerns_it() -> None:
    command = frontend_command(
        deployment(
            **{
                "namespace": "n", "transfer": "shm", "router": {"temperature": 0.5},
                "discovery": "etcd://h:1", "engine": {"dtype": "float32"},
                "security": {"secure-keys": "k"}, "http": {"host": "::", "port": 81},
                "frontend": {"count": 2, "options": {"mm-arena-gb": 1}},
                "environment": {"A": 1, "B": 1}, "served-model-name": "s",
            },
        ),
        REGISTRY,
    )
    assert command.line[:3] == [sys.executable, "-m", "frontend"]
    assert {
        ("--model", "m"), ("--namespace", "n"), ("--registry", "/r"),
        ("--secure-keys", "k"), ("--http-host", "::"),
        ("--http-port", "81"), ("--frontends", "2"), ("--mm-transfer", "shm"),
        ("--router-temperature", "0.5"), ("--dtype", "float32"), ("--mm-arena-gb", "1"),
        ("--served-model-name", "s"),
    } <= pairs(command.arguments)
    # What the file does not say is left to the environment and to defaults.
    assert "--router-mode" not in command.arguments
    # Command lines are seen by all on a host, and this may have a password in it.
    assert "--discovery" not in command.arguments
    assert command.environment == {"A": "1", "B": "1", "FOVEAL_DISCOVERY": "etcd://h:1"}


def test_workers_are_numbered_through_their_groups() -> None:
    first, second, third = worker_commands(
        deployment(
            engine={"dtype": "float32"},
            workers=[
                {"count": 2, "options": {"port": 0}},
                {"environment": {"A": "own"}, "options": {"dtype": "half"}},
            ],
            environment={"A": "all"},
            security={"insecure": True},
        ),
        None,
    )
    assert [c.name for c in (first, second, third)] == ["worker-1", "worker-2", "worker-3"]
    assert first.arguments == second.arguments
    assert [c.group for c in (first, second, third)] == [0, 0, 1]
    assert {("--port", "0"), ("--dtype", "float32")} <= pairs(first.arguments)
    assert "--insecure" in first.arguments and "--registry" not in first.arguments
    assert first.environment == {"A": "all"}
    assert ("--dtype", "half") in pairs(third.arguments)
    assert third.environment == {"A": "own"}


def devices(gpus: list[int], environ: dict[str, str]) -> list[str | None]:
    groups = [{"gpus": count} for count in gpus]
    placed = with_devices(worker_commands(deployment(workers=groups), None), environ)
    return [command.environment.get("CUDA_VISIBLE_DEVICES") for command in placed]


def test_each_worker_gets_gpus_of_its_own() -> None:
    assert devices([1, 2, 0, 1], {}) == ["0", "1,2", None, "3"]
    assert devices([1, 2], {"CUDA_VISIBLE_DEVICES": "5,7,GPU-x"}) == ["5", "7,GPU-x"]


def test_more_gpus_than_there_are_is_an_error() -> None:
    with pytest.raises(ValueError, match="worker-2 needs 2 more GPUs than the 2 of"):
        devices([1, 2], {"CUDA_VISIBLE_DEVICES": "5,7"})


@pytest.mark.parametrize(
    ("values", "environ", "seconds"),
    [
        ({}, {}, 25.0),
        ({"frontend": {"options": {"drain-timeout": 300}}}, {}, 300.0),
        ({"workers": [{}, {"options": {"drain-timeout": 40.5}}]}, {}, 40.5),
        ({"environment": {"FOVEAL_DRAIN_TIMEOUT": "90"}}, {"FOVEAL_DRAIN_TIMEOUT": "5"}, 90.0),
        ({}, {"FOVEAL_DRAIN_TIMEOUT": "60"}, 60.0),
        ({}, {"FOVEAL_DRAIN_TIMEOUT": "soon"}, 25.0),
    ],
)
def test_answers_may_take_as_long_as_any_process_gives_them(
    values: dict[str, object], environ: dict[str, str], seconds: float
) -> None:
    assert drain_seconds(deployment(**values), environ) == seconds
