"""One fleet for the whole run: a frontend, two workers, and plain vLLM beside them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from configs.demo.checkpoint import write_checkpoint
from tests.e2e.answers import answer_of
from tests.e2e.cases import CASES, Case
from tests.e2e.fleet import ROOT, Deployment, Frontend, Server
from tests.e2e.hosts import NotAllowed, TwoHosts
from tests.e2e.processes import Process
from tests.etcd_server import EtcdServer, require_etcd

TRAP = Path(__file__).parent / "processor_trap"

# The session's fleet is taken apart by the first of these, and gone in the others: never are
# there more than three engines, nor many processes beside them, each of which takes about a
# gigabyte.
LAST_MODULES = (
    "test_shutdown_leaves_nothing.py", "test_discovery.py", "test_two_hosts.py",
    "test_losses.py", "test_mock_workers.py", "test_seeing.py", "test_who_may_talk.py",
    "test_deployments.py", "test_ray_cluster.py",
    "test_adapters.py", "test_encode_workers.py", "test_encode_workers_far.py",
    "test_model_families.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here:
            item.add_marker(pytest.mark.e2e)
    items.sort(
        key=lambda item: LAST_MODULES.index(item.path.name) + 1
        if item.path.name in LAST_MODULES
        else 0
    )


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    target = ROOT / ".demo" / "checkpoint"
    write_checkpoint(target)
    return target


@pytest.fixture(scope="session")
def trap_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the workers' processor trap writes and looks, see ``processor_trap``."""
    return tmp_path_factory.mktemp("trap")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    try:
        hosts = TwoHosts(tmp_path_factory.mktemp("hosts"))
    except NotAllowed as error:
        pytest.skip(f"two hosts cannot be made here, so NOT TESTED: {error}")
    with hosts:
        yield hosts


class SessionFleet:
    """What every test talks to."""

    def __init__(self, checkpoint: Path, logs: Path, trap: Path) -> None:
        self.deployment = Deployment(checkpoint, logs)
        env = {
            "FOVEAL_PROCESSOR_TRAP": str(trap),
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(TRAP), os.environ.get("PYTHONPATH")])
            ),
        }
        # What the host's encoder outputs change about answers every test would show.
        shared = ("--multimodal-embedding-cache-capacity-gb", "0.25")
        self.workers: list[Process] = [
            self.deployment.start_worker(*shared, env=env),
            # Listens on TCP, and holds so little that blocks are evicted all the time.
            self.deployment.start_worker(
                *shared, "--port", "0", "--num-gpu-blocks-override", "320", env=env
            ),
        ]
        self.vllm: Server = self.deployment.start_vllm()
        self.frontend: Frontend = self.deployment.start_frontend()
        try:
            self.deployment.await_ready([self.frontend, self.vllm], workers=2)
        except BaseException:
            self.deployment.end()
            raise
        # Start-up measures with dummy images; from here on workers must not process any.
        (trap / "processors-forbidden").touch()


_running: list[Deployment] = []


@pytest.fixture(scope="session")
def session_fleet(
    checkpoint: Path, trap_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SessionFleet]:
    fleet = SessionFleet(checkpoint, tmp_path_factory.mktemp("logs"), trap_directory)
    _running.append(fleet.deployment)
    yield fleet
    fleet.deployment.end()
    _running.remove(fleet.deployment)


@pytest.fixture(scope="session")
def frontend(session_fleet: SessionFleet) -> Frontend:
    return session_fleet.frontend


@pytest.fixture(scope="session")
def vllm(session_fleet: SessionFleet) -> Server:
    return session_fleet.vllm


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[None]:
    report = yield
    if report.failed:
        for deployment in _running:
            for name, lines in deployment.last_lines().items():
                report.sections.append((name, lines))
    return report


@pytest.fixture(scope="session")
def expected(vllm: Server) -> Callable[[Case], Any]:
    """What plain vLLM answers to a case; asked once for each."""

    @cache
    def answer_to(name: str) -> Any:
        case = next(case for case in CASES if case.name == name)
        return answer_of(vllm.ask(case.path, case.body))

    return lambda case: answer_to(case.name)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    require_etcd()
    server = EtcdServer(tmp_path)
    try:
        server.start()
        yield server
    finally:
        server.end()


@pytest.fixture(scope="module")
def no_session_fleet() -> None:
    """Ends the session's fleet: there is no room for its engines and others'."""
    for deployment in _running:
        deployment.end()
