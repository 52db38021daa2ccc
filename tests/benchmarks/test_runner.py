"""Around the measuring: no section costs another, and every promised metric is printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks import machine
from benchmarks.metrics import CannotMeasure, Metric
from benchmarks.runner import Section, chosen_sections, run

PROMISED = [("first", "s", None), ("second", "ms", ">=1")]


@pytest.fixture(autouse=True)
def no_look_at_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a second to see how busy one is."""
    monkeypatch.setattr(machine, "describe", lambda: "a machine")


def fails() -> Iterator[Metric]:
    yield Metric("first", 1.0, "s")
    raise RuntimeError("broken")


def cannot() -> list[Metric]:
    raise CannotMeasure("no GPU")


def works() -> list[Metric]:
    return [Metric("third", 3.0, "s")]


def interrupted() -> list[Metric]:
    raise KeyboardInterrupt


def printed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    lines = capsys.readouterr().out.splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_a_failure_costs_neither_what_was_measured_nor_the_other_sections(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sections = [Section("a", PROMISED, fails), Section("b", [("third", "s", None)], works)]
    assert run(sections) == 1
    first, second, third = printed(capsys)
    assert (first["metric"], first["value"]) == ("first", 1.0)
    assert (second["metric"], second["value"], second["goal"]) == ("second", None, ">=1")
    assert second["why"] == "RuntimeError: broken"
    assert third["value"] == 3.0


def test_what_cannot_be_measured_here_is_no_failure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run([Section("a", PROMISED, cannot)]) == 0
    assert [line["why"] for line in printed(capsys)] == ["no GPU", "no GPU"]


def test_an_interrupted_benchmark_prints_no_metrics(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sections = [Section("b", [], works), Section("a", PROMISED, interrupted)]
    assert run(sections) == 130
    assert printed(capsys) == []


@pytest.mark.parametrize(
    "given, chosen", [([], ["a", "b", "c"]), (["c", "a"], ["a", "c"])]
)
def test_sections_keep_their_order(
    given: list[str], chosen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["x", *given])
    assert chosen_sections("x", "text", ["a", "b", "c"]) == chosen


def test_a_section_that_does_not_exist_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "d"])
    with pytest.raises(SystemExit):
        chosen_sections("x", "text", ["a"])
    assert "no such section: d" in capsys.readouterr().err
