"""What is let in, and what is refused for which reason."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from prometheus_client import CollectorRegistry
from vllm.exceptions import GracefulHTTPError, QueueOverflowError

from configs.schema import FrontendConfig
from frontend.admission import (
    Admission,
    AdmissionLimits,
    FleetLoad,
    NotAdmitted,
    current_body,
    limits_from,
)

LIMITS = AdmissionLimits(request_bytes=100, requests=4, body_bytes=250, body_seconds=1.0)


class Engine:
    """vLLM's limit on requests, and how many it knows of."""

    def __init__(self, limit: int = 1000) -> None:
        self.limit = limit
        self.unfinished = 0

    def check_admission(self, n: int = 1) -> None:
        if self.unfinished + n > self.limit:
            raise QueueOverflowError()

    def get_num_unfinished_requests(self) -> int:
        return self.unfinished


def make(
    limits: AdmissionLimits = LIMITS, engine: Engine | None = None, *loads: FleetLoad
) -> tuple[Admission, CollectorRegistry]:
    registry = CollectorRegistry()
    load = loads[0] if loads else FleetLoad()
    return Admission(limits, engine or Engine(), lambda: load, registry), registry


def refusal(admission: Admission) -> GracefulHTTPError | None:
    """Why one more request would be refused; None if it would not."""
    try:
        with admission.entered():
            return None
    except GracefulHTTPError as error:
        return error


def test_the_settings_are_in_bytes() -> None:
    limits = limits_from(FrontendConfig())
    assert limits.request_bytes == 64 << 20
    assert limits.body_bytes == 2 << 30


def test_one_request_too_many_is_told_to_try_elsewhere() -> None:
    admission, registry = make()
    with ExitStack() as inside:
        for _ in range(LIMITS.requests):
            assert refusal(admission) is None
            inside.enter_context(admission.entered())
        assert registry.get_sample_value("foveal_http_requests") == LIMITS.requests
        error = refusal(admission)
        assert isinstance(error, NotAdmitted)
        assert (error.reason, error.http_status) == ("requests", 503)
    assert refusal(admission) is None
    assert admission.requests == 0


def test_a_request_that_fails_is_not_under_way_any_more() -> None:
    admission, _ = make()
    with pytest.raises(ZeroDivisionError), admission.entered(), admission.body() as body:
        body.grow_to(10)
        raise ZeroDivisionError
    assert (admission.requests, admission.body_bytes) == (0, 0)


def test_a_body_that_is_too_large_is_refused_by_its_size() -> None:
    admission, _ = make()
    with admission.body() as body:
        body.grow_to(LIMITS.request_bytes)
        with pytest.raises(NotAdmitted, match="--max-request-mb") as refused:
            body.grow_to(LIMITS.request_bytes + 1)
    assert refused.value.http_status == 413
    assert admission.body_bytes == 0


def test_all_bodies_together_are_bounded() -> None:
    admission, registry = make()
    with admission.body() as first, admission.body() as second, admission.body() as third:
        first.grow_to(100)
        second.grow_to(60)
        second.grow_to(100)
        second.grow_to(80)  # counted already
        third.grow_to(50)
        assert registry.get_sample_value("foveal_http_body_bytes") == 250
        with pytest.raises(NotAdmitted) as refused:
            third.grow_to(51)
        assert (refused.value.reason, refused.value.http_status) == ("body bytes", 503)
    assert admission.body_bytes == 0


def test_media_that_a_request_names_count_until_its_end() -> None:
    admission, _ = make()
    assert current_body.get() is None
    with admission.body() as body:
        body.grow_to(100)
        assert current_body.get() is body
        body.fetched(150)
        body.grow_to(100)
        assert admission.body_bytes == 250
        with pytest.raises(NotAdmitted) as refused:
            body.fetched(1)
        assert refused.value.http_status == 503
    assert current_body.get() is None
    body.fetched(1)  # by a task that has outlived its request
    assert admission.body_bytes == 0


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (FleetLoad(2, requests=5), None),
        (FleetLoad(2, requests=6), "requests per worker"),
        (FleetLoad(3, requests=6), None),
        (FleetLoad(2, prefill_tokens=199), None),
        (FleetLoad(2, prefill_tokens=200), "prefill tokens per worker"),
        # Nobody to wait for: that is another answer's business.
        (FleetLoad(0, requests=100, prefill_tokens=1000), None),
    ],
)
def test_a_full_fleet_refuses_everywhere(load: FleetLoad, reason: str | None) -> None:
    limits = AdmissionLimits(
        100, 1000, 250, 1.0, requests_per_worker=3, prefill_tokens_per_worker=100
    )
    error = refusal(make(limits, None, load)[0])
    if reason is None:
        assert error is None
    else:
        assert isinstance(error, NotAdmitted)
        assert (error.reason, error.http_status) == (reason, 429)


def test_requests_on_their_way_to_the_fleet_count_there() -> None:
    limits = AdmissionLimits(100, 1000, 250, 1.0, requests_per_worker=3)
    load = FleetLoad(1, requests=2, own_requests=1)
    admission, _ = make(limits, None, load)
    with admission.entered():  # this is the one that is there
        assert refusal(admission) is None
        with admission.entered():  # and this one is still being read
            error = refusal(admission)
            assert error is not None and error.http_status == 429


def test_vllms_own_limit_counts_what_vllm_does_not_know_of_yet() -> None:
    engine = Engine(limit=3)
    admission, _ = make(LIMITS, engine)
    with admission.entered(), admission.entered():
        engine.unfinished = 1
        assert refusal(admission) is None
        with admission.entered():
            assert isinstance(refusal(admission), QueueOverflowError)
    engine.unfinished = 3  # children of one request count each
    assert isinstance(refusal(admission), QueueOverflowError)
