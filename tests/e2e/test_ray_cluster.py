"""configs/ray-cluster.yaml on a local Ray cluster of several nodes, with mock engines.

Ray places the workers, reserves a GPU for each, and starts again what ends, elsewhere if a
node is gone. The GPUs are numbers told to Ray: no engine touches them.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from configs.schema import WorkerConfig
from tests.e2e.fleet import ROOT
from tests.e2e.processes import Process, free_port, wait_until
from tests.e2e.test_deployments import READY_SECONDS, Up, ask, mocked
from tests.etcd_server import EtcdServer, require_etcd

pytest.importorskip("ray", reason="NO RAY: pip install 'foveal[ray]'")

CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={
    "num_cpus": 2, "num_gpus": 0, "port": int(sys.argv[1]), "include_dashboard": False,
})
nodes = [cluster.add_node(num_cpus=2, num_gpus=2) for _ in range(2)]
cluster.wait_for_nodes()
print("READY", flush=True)
for line in open(sys.argv[2]):
    cluster.remove_node(nodes.pop(), allow_graceful=False)
    print("REMOVED", flush=True)
"""


class RayCluster:
    """A head without GPUs and two nodes with two each, all on this host."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self.fifo = directory / "orders"
        os.mkfifo(self.fifo)
        self.process = Process(
            [sys.executable, "-c", CLUSTER, str(self.port), str(self.fifo)],
            directory / "ray.log",
            {**os.environ, "PYTHONPATH": str(ROOT), "RAY_DISABLE_IMPORT_WARNING": "1"},
            directory,
        )
        self._orders: Any = None

    def wait_until_said(self, words: str) -> None:
        def is_said() -> bool:
            assert self.process.exit_status is None, self.process.last_lines(40)
            return words in self.process.log.read_text()

        wait_until(is_said, READY_SECONDS, f"Ray {words}")
        if self._orders is None:
            self._orders = self.fifo.open("w")

    def lose_a_node(self) -> None:
        self._orders.write("remove\n")
        self._orders.flush()
        self.wait_until_said("REMOVED")

    def end(self) -> None:
        if self._orders is not None:
            self._orders.close()
        self.process.end()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RayCluster]:
    cluster = RayCluster(tmp_path)
    try:
        cluster.wait_until_said("READY")
        yield cluster
    finally:
        cluster.end()


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    require_etcd()
    server = EtcdServer(tmp_path)
    try:
        server.start()
        yield server
    finally:
        server.end()


def placements(up: Up) -> list[tuple[str, int, str]]:
    """Worker, process and GPU of each time that Ray has started one."""
    found = re.findall(
        r"Ray started (\S+)(?: again)? on \S+, process (\d+), GPU (\S+)", up.said()
    )
    return [(name, int(pid), gpu) for name, pid, gpu in found]


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


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
        "ray.address": f"127.0.0.1:{cluster.port}",
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

        # A node ends: what was there moves to the other, which has GPUs left.
        running = {name: pid for name, pid, _ in placements(up)}
        cluster.lose_a_node()
        gone = [name for name, pid in running.items() if not alive(pid)]
        if not gone:  # both were on the node that stayed
            return
        for name in gone:
            wait_until(
                lambda n=name: dict((w, p) for w, p, _ in placements(up))[n] != running[n],
                READY_SECONDS, f"{name} elsewhere",
            )
        wait_until(lambda: len(up.ready()) == 2, READY_SECONDS, "two workers still")
        assert ask(up).status_code == 200
    except BaseException:
        print(up.everything())
        raise
    finally:
        pids = [pid for _, pid, _ in placements(up)]
        up.process.end(60.0)
        wait_until(lambda: not any(map(alive, pids)), 30.0, "no worker left")
    assert up.said().splitlines()[-1] == "Stopped"
