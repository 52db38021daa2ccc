"""Options as a file states them, and as a command line takes them."""

from __future__ import annotations

import pytest

from configs.deployment.options import Value, flags_of, problems_of
from configs.schema import WorkerConfig


@pytest.mark.parametrize(
    "value, arguments",
    [
        (True, ["--x"]),
        (False, ["--no-x"]),
        (3, ["--x", "3"]),
        (0.5, ["--x", "0.5"]),
        ("a b", ["--x", "a b"]),
        (["a", 1], ["--x", "a", "1"]),
        ({"a": {"b": 1}}, ["--x", '{"a": {"b": 1}}']),
    ],
)
def test_a_value_becomes_arguments(value: Value, arguments: list[str]) -> None:
    assert flags_of({"x": value}) == arguments


def test_flags_of_vllm_are_left_to_vllm() -> None:
    assert problems_of({"dtype": "nonsense"}, WorkerConfig, {}) == {}


def test_settings_of_ours_are_checked() -> None:
    found = problems_of({"port": 70000, "host": "h", "--port": 1}, WorkerConfig, {})
    assert found == {
        "port": "must be at most 65535", "--port": "write it port"
    }
