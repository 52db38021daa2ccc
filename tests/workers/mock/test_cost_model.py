from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.mock.cost_model import decode_seconds, step_seconds


def test_a_step_costs_what_it_computes() -> None:
    # 8 ms, 1,000 * 80 us, 500 * 60 us, 10 * 80 us, 100,000 * 29 ns
    expected = 0.008 + 0.080 + 0.030 + 0.0008 + 0.0029
    assert step_seconds(1000, 500, 10, 100_000) == pytest.approx(expected)


def test_a_step_of_nothing_costs_its_weights() -> None:
    assert step_seconds(0, 0, 0, 0) == 0.008


@given(st.integers(1, 50), st.integers(1, 20), st.integers(0, 10_000))
def test_steps_taken_together_cost_what_they_cost_one_by_one(
    steps: int, requests: int, context: int
) -> None:
    one_by_one = sum(
        step_seconds(0, 0, requests, context + step * requests) for step in range(steps)
    )
    assert decode_seconds(steps, requests, context) == pytest.approx(one_by_one)
