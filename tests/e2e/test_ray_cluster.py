"""configs/ray-cluster.yaml on a local Ray cluster of several nodes, with mock engines.

Ray places the workers, reserves a GPU for each, and starts again what ends; for the loss of a
node see tests/configs/deployment/test_workers_by_ray.py. The GPUs are numbers told
to Ray: no engine touches them.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.schema import WorkerConfig
from tests.e2e.processes import free_port, wait_until
from tests.e2e.up import READY_SECONDS, Up, ask, mocked
from tests.etcd_server import EtcdServer
from tests.ray_cluster import RayCluster, is_alive, require_ray

require_ray()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RayCluster]:
    cluster = RayCluster(tmp_path, [1, 1])
    try:
        cluster.wait_until_ready()
        yield cluster
    finally:
        cluster.end()


def placements(up: Up) -> list[tuple[str, int, str]]:
    """Worker, process and GPU of each time that Ray has started one."""
    found = re.findall(
        r"Ray started (\S+)(?: again)? on \S+, process (\d+), GPU (\S+)", up.said()
    )
    return [(name, int(pid), gpu) for name, pid, gpu in found]


def test_ray_places_workers_and_keeps_them(
    checkpoint: Path,
    no_session_fleet: None,
    tmp_path: Path,
    etcd: EtcdServer,
    cluster: RayCluster,
) -> None:
    overrides = mocked(checkpoint)
    overrides["workers"] = [{**overrides["workers"][0], "gpus": 1}]
    overrides |= {
        "discovery": etcd.address, "http.host": "127.0.0.1", "ray.cpus": 1,
        "ray.address": cluster.address,
    }
    if "insecure" not in WorkerConfig.model_fields:
        overrides["security.insecure"] = False
    up = Up(tmp_path / "up", "ray-cluster", free_port(), overrides)
    try:
        up.wait_until_said("Ctrl-C stops it.")
        first = placements(up)
        assert {name for name, _, _ in first} == {"worker-1", "worker-2"}
        assert all(gpu for _, _, gpu in first)
        assert ask(up).status_code == 200

        # A worker's process ends: Ray starts it again.
        os.kill(first[0][1], signal.SIGKILL)
        up.wait_until_said(f"Ray started {first[0][0]} again")
        wait_until(lambda: len(up.ready()) == 2, READY_SECONDS, "two workers again")

    except BaseException:
        print(up.everything())
        raise
    finally:
        pids = [pid for _, pid, _ in placements(up)]
        up.process.end(60.0)
        wait_until(lambda: not any(map(is_alive, pids)), 30.0, "no worker left")
    assert up.said().splitlines()[-1] == "Stopped"
