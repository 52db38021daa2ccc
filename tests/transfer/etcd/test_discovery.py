"""Workers that announce themselves in a real etcd, and who sees them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager

import msgspec
import pytest

from tests.etcd_server import EtcdServer
from tests.fakes import make_facts, within
from transfer.errors import EtcdUnavailable
from transfer.etcd import discovery as discovery_module
from transfer.etcd.address import parse_etcd_address
from transfer.etcd.discovery import EtcdDiscovery
from transfer.process import process_start_time, this_process
from transfer.registry import Registry, WorkerRecord

LEASE_SECONDS = 2
"""The shortest that etcd grants."""

Records = dict[str, WorkerRecord]
Waiter = Callable[[Callable[[Records], bool]], AsyncIterator[None]]


def record_of(name: str = "w", **changes: object) -> WorkerRecord:
    record = WorkerRecord(
        worker=name, address="tcp://127.0.0.1:1", facts=make_facts(),
        **msgspec.structs.asdict(this_process()),
    )
    return msgspec.structs.replace(record, **changes)


@pytest.fixture
def discover(etcd: EtcdServer, registry: Registry) -> Iterator[Callable[..., EtcdDiscovery]]:
    made: list[EtcdDiscovery] = []

    def make(namespace: str = "test") -> EtcdDiscovery:
        made.append(
            EtcdDiscovery(
                parse_etcd_address(etcd.address), namespace, registry, LEASE_SECONDS
            )
        )
        return made[-1]

    yield make
    for each in made:
        each.close()


@asynccontextmanager
async def watching(discovery: EtcdDiscovery) -> AsyncIterator[Callable[..., object]]:
    """Within, ``await until(condition)`` waits until the workers seen fulfil it."""
    async with aclosing(discovery.watch()) as views:

        async def until(condition: Callable[[Records], bool]) -> Records:
            async def look() -> Records:
                async for records in views:
                    if condition(records):
                        return records
                raise AssertionError("the watch ended")

            # A process that imports vLLM first may take its time.
            return await within(look(), 120.0)

        yield until


@pytest.mark.anyio
async def test_a_worker_is_found_as_it_announced_itself(
    discover: Callable[..., EtcdDiscovery],
) -> None:
    record = record_of()
    async with watching(discover()) as until:
        assert await until(lambda r: True) == {}
        worker = discover()
        worker.announce(record)
        assert await until(lambda r: "w" in r) == {"w": record}
        worker.withdraw("w")
        worker.withdraw("w")
        assert await until(lambda r: not r) == {}


@pytest.mark.anyio
async def test_namespaces_do_not_see_each_other(
    discover: Callable[..., EtcdDiscovery],
) -> None:
    discover("other").announce(record_of("theirs"))
    discover().announce(record_of("ours"))
    async with watching(discover()) as until:
        assert set(await until(bool)) == {"ours"}
    async with watching(discover("other")) as until:
        assert set(await until(bool)) == {"theirs"}


@pytest.mark.anyio
async def test_what_closes_is_gone_at_once(discover: Callable[..., EtcdDiscovery]) -> None:
    async with watching(discover()) as until:
        worker = discover()
        worker.announce(record_of())
        await until(bool)
        worker.close()
        worker.close()
        await until(lambda r: not r)


ANNOUNCE = """
import sys, time
from pathlib import Path
import msgspec
from transfer.etcd.address import parse_etcd_address
from transfer.etcd.discovery import EtcdDiscovery
from transfer.registry import Registry, WorkerRecord
discovery = EtcdDiscovery(
    parse_etcd_address(sys.argv[1]), "test", Registry(Path(sys.argv[2]), "test"), 2
)
discovery.announce(msgspec.json.decode(sys.argv[3], type=WorkerRecord))
time.sleep(600)
"""


@pytest.mark.anyio
async def test_a_worker_that_dies_is_forgotten_when_its_lease_ends(
    etcd: EtcdServer, registry: Registry, discover: Callable[..., EtcdDiscovery]
) -> None:
    # Of another host, so that only the lease can tell.
    record = msgspec.json.encode(record_of(host="elsewhere")).decode()
    async with watching(discover()) as until:
        with subprocess.Popen(
            [sys.executable, "-c", ANNOUNCE, etcd.address, str(registry.path.parent), record]
        ) as worker:
            await until(lambda r: "w" in r)
            worker.kill()
        await until(lambda r: not r)


@pytest.mark.anyio
async def test_a_dead_process_of_this_host_does_not_count_while_its_lease_lasts(
    discover: Callable[..., EtcdDiscovery],
) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        start_time = process_start_time(other.pid)
        other.kill()
    announcer = discover()
    announcer.announce(record_of("dead", pid=other.pid, start_time=start_time))
    announcer.announce(record_of("living"))
    async with watching(discover()) as until:
        assert set(await until(lambda r: "living" in r)) == {"living"}


@pytest.mark.anyio
async def test_a_socket_of_another_host_is_not_offered(
    discover: Callable[..., EtcdDiscovery],
) -> None:
    announcer = discover()
    announcer.announce(record_of("far", host="elsewhere", address="ipc:///x"))
    announcer.announce(record_of("near", address="ipc:///x"))
    async with watching(discover()) as until:
        assert set(await until(lambda r: "near" in r)) == {"near"}


@pytest.mark.anyio
@pytest.mark.parametrize("data_lost", [False, True])
async def test_an_etcd_that_restarts_finds_everything_again(
    etcd: EtcdServer, discover: Callable[..., EtcdDiscovery], data_lost: bool
) -> None:
    first = discover()
    first.announce(record_of("first"))
    seen: list[set[str]] = []

    def sees(*names: str) -> Callable[[Records], bool]:
        def condition(records: Records) -> bool:
            seen.append(set(records))
            return set(records) == set(names)

        return condition

    async with watching(discover()) as until:
        await until(sees("first"))
        seen.clear()
        etcd.kill()
        if data_lost:
            etcd.forget()
        second = discover()
        second.announce(record_of("second"))
        etcd.start()
        await until(sees("first", "second"))
        first.withdraw("first")
        await until(sees("second"))
    # Nobody was given up for it meanwhile.
    assert all(seen[:-1]) and "first" in set.union(*seen)
    assert all("first" in names for names in seen[:-1])


@pytest.mark.anyio
async def test_who_is_not_back_after_the_loss_of_all_data_is_given_up(
    etcd: EtcdServer, discover: Callable[..., EtcdDiscovery]
) -> None:
    worker = discover()
    worker.announce(record_of())
    async with watching(discover()) as until:
        await until(bool)
        etcd.kill()
        etcd.forget()
        worker.close()
        etcd.start()
        await until(lambda r: not r)


def test_all_agree_on_one_seed_that_outlives_etcd(
    etcd: EtcdServer, discover: Callable[..., EtcdDiscovery]
) -> None:
    seed = discover().shared_seed()
    assert len(seed) == 32
    assert discover().shared_seed() == seed
    assert discover("other").shared_seed() != seed
    etcd.kill()
    etcd.start()
    assert discover().shared_seed() == seed


def test_an_etcd_that_never_answers_is_named(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery_module, "START_SECONDS", 0.0)
    nobody = EtcdDiscovery(parse_etcd_address("etcd://127.0.0.1:1"), "test", registry)
    with pytest.raises(EtcdUnavailable, match=r"etcd at 127\.0\.0\.1:1"):
        nobody.shared_seed()


@pytest.mark.anyio
async def test_of_several_endpoints_one_that_answers_is_enough(
    etcd: EtcdServer, registry: Registry
) -> None:
    address = parse_etcd_address(f"etcd://127.0.0.1:1,127.0.0.1:{etcd.port}")
    worker = EtcdDiscovery(address, "test", registry, LEASE_SECONDS)
    worker.announce(record_of())
    async with watching(worker) as until:
        await until(bool)
    worker.close()
