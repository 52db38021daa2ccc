"""What is kept and counted of each request."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from frontend.metrics import MOST_GONE_WORKERS, FrontendMetrics
from frontend.receipt import Receipt, current_receipt
from frontend.request_log import PICTURE_BYTES, RequestLog, SendTimes
from frontend.router.cost import Candidate
from frontend.router.router import Route
from frontend.sent_request import NoWorkers
from tests.fakes import make_item, make_request
from tests.frontend.fleets import Fleet
from transfer.registry import Registry

pytestmark = pytest.mark.anyio

TIMES = SendTimes(1.0, 1.5, 2.0)


def make_route(worker: str = "a", others: int = 1) -> Route:
    alternatives = tuple(Candidate(f"other-{n}", 100.0 + n, 1) for n in range(others))
    return Route(worker, 2, 0, 2, 8.0, alternatives)


def make_log(size: int = 4) -> tuple[RequestLog, CollectorRegistry]:
    registry = CollectorRegistry()
    log = RequestLog(FrontendMetrics(registry), size)
    log.block_size = 16
    return log, registry


async def test_a_request_is_followed_to_its_end(registry: Registry) -> None:
    async with Fleet(registry) as fleet:
        worker = await fleet.start()
        await fleet.start("worker-2")
        worker.hold([])
        request = make_request("r", items=[make_item(1.0)])
        await fleet.client.add_request_async(request)
        (record,) = fleet.client.log.last
        assert record.outcome == "running"
        assert (record.prompt_tokens, record.items, record.transfer) == (40, 1, "shm")
        assert [other.worker for other in record.alternatives] == [
            name for name in ("worker-1", "worker-2") if name != record.worker
        ]
        await fleet.answer("r")
        assert record.outcome == "length"
        assert record.first_token_seconds is not None and record.seconds is not None
        assert 0 < record.first_token_seconds <= record.seconds
        labels = {"worker": record.worker, "outcome": "length"}
        value = fleet.metrics.get_sample_value
        assert value("foveal_requests_finished_total", labels) == 1
        assert value("foveal_router_decision_seconds_count") == 1


async def test_an_abort_is_counted_once(registry: Registry) -> None:
    async with Fleet(registry) as fleet:
        worker = await fleet.start()
        await fleet.hold_request(worker)
        for _ in range(2):
            await fleet.client.abort_requests_async(["r"])
        labels = {"worker": "worker-1", "outcome": "abort"}
        assert fleet.metrics.get_sample_value("foveal_requests_finished_total", labels) == 1
        assert fleet.client.log.last[-1].outcome == "abort"


async def test_a_request_without_a_worker_is_counted(registry: Registry) -> None:
    async with Fleet(registry, wait=0.0) as fleet:
        with pytest.raises(NoWorkers):
            await fleet.client.add_request_async(make_request("r"))
        labels = {"worker": "", "outcome": "no_worker"}
        assert fleet.metrics.get_sample_value("foveal_requests_finished_total", labels) == 1
        assert not fleet.client.log.last


async def test_only_the_last_are_kept() -> None:
    log, _ = make_log(size=4)
    for number in range(10):
        log.routed(make_request(f"r{number}"), make_route(others=40), "none", TIMES)
    assert [record.number for record in log.last] == [7, 8, 9, 10]
    assert all(len(record.alternatives) < 40 for record in log.last)


async def test_one_that_moves_stays_one() -> None:
    log, registry = make_log()
    request = make_request("r")
    log.routed(request, make_route("a"), "shm", TIMES)
    log.routed(request, make_route("b"), "inline", TIMES)
    (record,) = log.last
    assert (record.worker, record.transfer, record.moves) == ("b", "inline", 1)
    log.finished("r", "stop")
    log.finished("r", "stop")
    value = registry.get_sample_value
    labels = {"worker": "b", "outcome": "stop"}
    assert value("foveal_requests_finished_total", labels) == 1


async def test_what_pictures_take_is_bounded() -> None:
    log, _ = make_log(size=100)
    token = current_receipt.set(Receipt(pictures=[bytes(PICTURE_BYTES // 4)]))
    try:
        for number in range(8):
            log.routed(make_request(f"r{number}"), make_route(), "shm", TIMES)
    finally:
        current_receipt.reset(token)
    assert [len(record.pictures) for record in log.last] == [0] * 4 + [1] * 4


async def test_workers_that_are_gone_are_shown_no_longer_than_some_others() -> None:
    log, registry = make_log(size=1)
    for number in range(MOST_GONE_WORKERS + 3):
        log.routed(make_request(f"r{number}"), make_route(f"w{number}"), "shm", TIMES)
        log.finished(f"r{number}", "stop")
        log._metrics.worker_gone(f"w{number}")
        log._metrics.worker_came("w1")
    shown = {
        sample.labels["worker"]
        for family in registry.collect()
        if family.name == "foveal_requests_finished"
        for sample in family.samples
    }
    assert "w0" not in shown and "w1" in shown
    assert len(shown) <= MOST_GONE_WORKERS + 1
