from __future__ import annotations

import json

import pytest

from benchmarks.metrics import Metric, median_ratio, rounded, unmeasured


def test_a_metric_is_one_line_of_json() -> None:
    line = Metric("bytes", 790, "B", "<=2048").line()
    assert "\n" not in line
    assert json.loads(line) == {
        "metric": "bytes", "value": 790, "unit": "B", "goal": "<=2048", "ok": True,
    }


@pytest.mark.parametrize(
    ("goal", "value", "ok"),
    [
        ("<=0.5", 0.5, True),
        ("<=0.5", 0.51, False),
        (">=1.25", 1.25, True),
        (">=1.25", 1.2, False),
        ("==1", 1.0, True),
        ("==1", 1.1, False),
        ("==1", 0.0, False),
    ],
)
def test_a_goal_is_met_up_to_its_bound(goal: str, value: float, ok: bool) -> None:
    assert Metric("m", value, "ratio", goal).ok is ok


def test_without_a_goal_nothing_is_judged() -> None:
    fields = json.loads(Metric("m", 2.5, "ms").line())
    assert fields["goal"] is None
    assert fields["ok"] is None


def test_what_cannot_be_measured_says_why_and_meets_no_goal() -> None:
    (metric,) = unmeasured([("m", "ratio", ">=1")], "no GPU")
    assert json.loads(metric.line()) == {
        "metric": "m", "value": None, "unit": "ratio", "goal": ">=1", "ok": None,
        "why": "no GPU",
    }


@pytest.mark.parametrize("goal", ["<2", "~1", "1", "<= 2"])
def test_a_goal_that_means_nothing_is_refused(goal: str) -> None:
    with pytest.raises(ValueError, match="is not a goal"):
        Metric("m", 1, "B", goal)


def test_a_value_and_a_reason_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="needs a value"):
        Metric("m", None, "B")
    with pytest.raises(ValueError, match="needs a value"):
        Metric("m", 1, "B", why="too slow")


def test_a_slow_spell_of_both_sides_does_not_move_the_ratio() -> None:
    assert median_ratio([1.0, 10.0, 1.0], [2.0, 20.0, 2.0]) == 0.5


def test_one_bad_round_does_not_move_the_ratio() -> None:
    assert median_ratio([1.0, 9.0, 1.1], [2.0, 2.0, 2.0]) == 0.55


def test_rounds_must_be_pairs() -> None:
    with pytest.raises(ValueError, match="shorter"):
        median_ratio([1.0, 2.0], [1.0])


@pytest.mark.parametrize(("value", "shown"), [(0.33333, 0.333), (12.3456, 12.3), (2.0, 2.0)])
def test_numbers_are_shown_to_three_digits(value: float, shown: float) -> None:
    assert rounded(value) == shown
