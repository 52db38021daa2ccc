"""A Ray cluster of several nodes on this host, as a process of its own.

In a process, because Ray's client can be in one cluster only and keeps threads.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import pytest

from tests.e2e.processes import Process, wait_until

START_SECONDS = 200.0
ROOT = Path(__file__).parents[1]

_CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={
    "num_cpus": 0, "num_gpus": 0, "include_dashboard": False,
})
nodes = [cluster.add_node(num_cpus=4, num_gpus=int(gpus)) for gpus in sys.argv[2:]]
cluster.wait_for_nodes()
print("READY", cluster.address, flush=True)
for order in open(sys.argv[1]):
    if order.startswith("add"):
        nodes.append(cluster.add_node(num_cpus=4, num_gpus=int(order.split()[1])))
    else:
        cluster.remove_node(nodes.pop(), allow_graceful=False)
    print("DONE", order, flush=True)
cluster.shutdown()
"""


def require_ray() -> None:
    """Skip a test where Ray is not installed, and say how to get it."""
    pytest.importorskip("ray", reason="NO RAY: pip install 'foveal[ray]'")


class RayCluster:
    """A head without GPUs, and a node for each of ``gpus`` with that many."""

    def __init__(self, directory: Path, gpus: Sequence[int], path: str = str(ROOT)) -> None:
        """``path``: where Python looks for packages on all nodes."""
        self.address = ""
        # Short, because Ray makes Unix sockets in it.
        self._temporary = tempfile.mkdtemp(prefix="fv-r", dir="/tmp")
        self._fifo = directory / "orders"
        os.mkfifo(self._fifo)
        self._orders: IO[str] | None = None
        self.process = Process(
            [sys.executable, "-P", "-c", _CLUSTER, str(self._fifo), *map(str, gpus)],
            directory / "ray.log",
            {**os.environ, "PYTHONPATH": path, "RAY_TMPDIR": self._temporary},
            directory,
        )

    def wait_until_ready(self) -> None:
        self._wait_until_said("READY")
        said = self.process.log.read_text()
        self.address = said.partition("READY ")[2].split()[0]
        self._orders = self._fifo.open("w")

    def lose_node(self) -> None:
        """End the node that came last, without ceremony."""
        self._order("remove")

    def add_node(self, gpus: int) -> None:
        self._order(f"add {gpus}")

    def end(self) -> None:
        if self._orders is not None:
            self._orders.close()  # that is its order to end
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(30.0)
        self.process.end(5.0)
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _order(self, order: str) -> None:
        assert self._orders is not None
        self._orders.write(order + "\n")
        self._orders.flush()
        self._wait_until_said(f"DONE {order}")

    def _wait_until_said(self, words: str) -> None:
        def is_said() -> bool:
            assert self.process.exit_status is None, self.process.last_lines(40)
            return words in self.process.log.read_text()

        wait_until(is_said, START_SECONDS, f"Ray {words}")


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
