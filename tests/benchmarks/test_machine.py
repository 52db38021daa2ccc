from __future__ import annotations

from benchmarks.machine import _ticks, busy_share


def test_waiting_is_not_work() -> None:
    stat = "cpu  10 1 5 80 4 2 3 1 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n"
    assert _ticks(stat) == (22, 106)


def test_a_share_is_a_share() -> None:
    assert 0.0 <= busy_share(0.05) <= 1.0
