from __future__ import annotations

import pytest

from benchmarks.soak.memory import MIB, Samples, table


def test_growth_is_that_of_the_last_half() -> None:
    filling = [n * MIB for n in (10, 20, 30, 40, 50, 50, 50, 50)]
    assert Samples("filling", filling).growth == 0
    leaking = [n * MIB for n in (10, 20, 30, 40, 50, 60, 70, 80)]
    assert Samples("leaking", leaking).growth == pytest.approx(75 / 55 - 1)


def test_the_table_has_every_quarter() -> None:
    text = table([Samples("worker", [n * MIB for n in (1, 2, 3, 4, 5, 6, 7, 8)])])
    assert text.splitlines()[1].split()[:5] == ["worker", "2", "4", "6", "8"]
