from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.chaos.clients import Tally
from benchmarks.chaos.disturbances import Recovery
from benchmarks.chaos.report import GOALS, PhaseResult, metrics, percentile, table


def phase(**changes: object) -> PhaseResult:
    tally = Tally(asked=10, exact=7, tokens_wrong=0)
    tally.ended["its frontend was killed"] = 3
    values: dict[str, object] = {
        "name": "mocks", "seconds": 60.0, "tally": tally,
        "disturbances": Counter({"kill worker": 2}),
        "recoveries": [Recovery("worker", seconds) for seconds in (0.5, 1.0, 4.0)],
        "leases": 0, "charges": 0, "segments": [], "fds_grown": 0, "rejoined": [0.4],
        "moved": 4, **changes,
    }
    return PhaseResult(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([5], 0.95, 5), (range(1, 101), 0.95, 95), (range(1, 21), 0.95, 19), ([3, 1], 0.5, 1)],
)
def test_percentiles(values: list[float], share: float, expected: float) -> None:
    assert percentile(list(values), share) == expected


def test_phases_are_added_up_and_every_promised_metric_is_there() -> None:
    lossy = phase(leases=2, fds_grown=1)
    lossy.tally.lost.append("hung")
    measured = {metric.name: metric for metric in metrics([phase(), lossy])}
    assert list(measured) == [name for name, _, _ in GOALS]
    assert measured["requests_lost"].value == 1
    assert measured["requests_lost"].ok is False
    assert (measured["leases_left"].value, measured["fds_grown"].value) == (2, 1)
    assert measured["tokens_wrong"].ok is True
    assert measured["recovery_s_p95"].value == 4.0
    assert measured["rejoin_s_p95"].value == 0.4
    assert measured["disturbances"].value == 4


def test_without_a_kill_there_is_no_recovery_to_tell_of() -> None:
    measured = {metric.name: metric for metric in metrics([phase(recoveries=[])])}
    assert measured["recovery_s_p95"].value is None
    assert measured["recovery_s_p95"].why


def test_the_pause_of_a_clients_frontend_is_not_counted_but_told_of() -> None:
    both = phase(recoveries=[Recovery("worker", 2.0), Recovery("worker", 16.5, paused=13.0)])
    measured = {metric.name: metric for metric in metrics([both])}
    assert measured["recovery_s_p95"].value == 3.5
    text = table([both])
    assert "2 clients: median 2.00 s, p95 3.50 s, longest 3.50 s" in text
    assert "of 1 of them was paused meanwhile, and with that the longest 16.50 s" in text


def test_the_table_accounts_for_every_request() -> None:
    text = table([phase()])
    assert "its frontend was killed" in text
    assert "median 1.00 s, p95 4.00 s" in text
