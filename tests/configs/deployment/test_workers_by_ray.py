"""Workers on a Ray cluster of two nodes; stand-ins are the processes."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.processes import Process, wait_until
from tests.ray_cluster import RayCluster, is_alive, require_ray

require_ray()

ROOT = Path(__file__).parents[3]
SECONDS = 120.0
STAND_IN = """
import os, sys, time
if "--bad" in sys.argv:
    sys.exit("no" if os.environ.get("FOVEAL_LOG_FORMAT") != "text" else 2)
print("listening at", sys.argv[sys.argv.index("--host") + 1], flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a package that takes the place of ours."""
    place = tmp_path_factory.mktemp("ray")
    package = place / "stand-in" / "workers"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(STAND_IN)
    return place


@pytest.fixture(scope="module")
def path(place: Path) -> str:
    return f"{place / 'stand-in'}:{ROOT}"


@pytest.fixture(scope="module")
def cluster(place: Path, path: str) -> Iterator[RayCluster]:
    cluster = RayCluster(place, [1, 1], path)
    try:
        cluster.wait_until_ready()
        yield cluster
    finally:
        cluster.end()


class Up:
    """``foveal up --only workers`` for a file with some workers of one GPU each."""

    def __init__(
        self, directory: Path, path: str, address: str, count: int, **options: object
    ) -> None:
        file = {
            "model": "m", "launcher": "ray", "registry": str(directory),
            "ray": {"address": address},
            "workers": [{"count": count, "gpus": 1, "options": options}],
        }
        (directory / "d.yaml").write_text(json.dumps(file))
        self.process = Process(
            [sys.executable, "-P", "-m", "configs", "up", "d.yaml", "--only", "workers"],
            directory / "up.log", {**os.environ, "PYTHONPATH": path}, directory,
        )

    def said(self) -> str:
        return self.process.log.read_text()

    def wait_until_said(self, words: str) -> None:
        def is_said() -> bool:
            assert self.process.exit_status is None, self.said()
            return words in self.said()

        wait_until(is_said, SECONDS, words)

    def placements(self) -> list[tuple[str, int]]:
        """Worker and process of each time that Ray has started one."""
        found = re.findall(r"Ray started (\S+)(?: again)? on \S+, process (\d+)", self.said())
        return [(name, int(pid)) for name, pid in found]


def test_a_gpu_is_reserved_for_each_and_what_ends_is_started_again(
    cluster: RayCluster, path: str, tmp_path: Path
) -> None:
    up = Up(tmp_path, path, cluster.address, 3)
    try:
        wait_until(lambda: len(up.placements()) == 2, SECONDS, "two workers placed")
        (first, pid), (second, _) = up.placements()
        assert first != second
        assert up.said().count(", GPU 0") == 2  # the first GPU of either node
        os.kill(pid, signal.SIGKILL)
        # Its GPU is free for a moment: Ray gives it to who has waited, or back.
        wait_until(lambda: len(up.placements()) == 3, SECONDS, "a worker started again")
        up.process.signal(signal.SIGTERM)
        assert up.process.wait(SECONDS) == 0, up.said()
        assert up.said().splitlines()[-1] == "Stopped"
        pids = [pid for _, pid in up.placements()]
        wait_until(lambda: not any(map(is_alive, pids)), 20.0, "no worker left")
    finally:
        up.process.end()


def test_a_killed_command_leaves_no_worker(
    cluster: RayCluster, path: str, tmp_path: Path
) -> None:
    up = Up(tmp_path, path, cluster.address, 1)
    try:
        up.wait_until_said("Ray started worker-1")
        ((_, pid),) = up.placements()
        up.process.signal(signal.SIGKILL)
        up.process.wait(20.0)
        wait_until(lambda: not is_alive(pid), SECONDS, "the worker gone")
    finally:
        up.process.end()


def test_settings_that_cannot_work_are_not_tried_again(
    cluster: RayCluster, path: str, tmp_path: Path
) -> None:
    up = Up(tmp_path, path, cluster.address, 1, bad=True)
    try:
        assert up.process.wait(SECONDS) == 1
        assert re.search(r"foveal up: worker-1 on \S+ cannot work:", up.said())
    finally:
        up.process.end()


def test_a_cluster_that_is_not_there_is_one_sentence(path: str, tmp_path: Path) -> None:
    up = Up(tmp_path, path, "127.0.0.1:1", 1)
    assert up.process.wait(SECONDS) == 1
    assert "foveal up: no Ray cluster at 127.0.0.1:1: " in up.said()
    assert "ray start --head" in up.said()


def test_what_was_on_a_lost_node_goes_to_another(
    cluster: RayCluster, path: str, tmp_path: Path
) -> None:
    up = Up(tmp_path, path, cluster.address, 2)
    try:
        wait_until(lambda: len(up.placements()) == 2, SECONDS, "two workers placed")
        pids = dict(up.placements())
        cluster.lose_node()
        wait_until(
            lambda: not all(map(is_alive, pids.values())), SECONDS, "one ended with its node"
        )
        (gone,) = [name for name, pid in pids.items() if not is_alive(pid)]
        cluster.add_node(1)
        up.wait_until_said(f"Ray started {gone} again")
        assert len(up.placements()) == 3
    finally:
        up.process.end()
