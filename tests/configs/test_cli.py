"""The ``foveal`` command."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

import pytest

from configs import cli

ROOT = Path(__file__).parents[2]
DEMO = str(ROOT / "configs" / "demo-cpu.yaml")


def test_it_is_installed_under_its_name() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["foveal"].partition(":")
    assert getattr(importlib.import_module(module), name) is cli.main


def test_a_file_that_is_right_is_summed_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "check_flags", lambda file: [])
    assert cli.main(["check", DEMO, "--set", "workers.0.count=3"]) == 0
    assert capsys.readouterr().out == (
        f"{DEMO} is right: .demo/checkpoint on 3 workers (process), 1 frontend processes at "
        "127.0.0.1:8000\n"
    )


def test_what_is_wrong_goes_to_standard_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", DEMO, "--set", "workers.0.count=0"]) == 2
    assert "--set workers.0.count: " in capsys.readouterr().err
    monkeypatch.setattr(cli, "check_flags", lambda file: ["x.yaml:1: no"])
    assert cli.main(["check", DEMO]) == 2
    assert capsys.readouterr().err == "x.yaml:1: no\n"


def test_host_and_port_are_short_for_two_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(cli, "run_up", lambda file, parts: seen.append((file, parts)))
    assert cli.main(["up", DEMO, "--host", "::", "--port", "81"]) == 0
    assert cli.main(["up", DEMO, "--only", "workers"]) == 0
    (first, both), (_, one) = seen
    assert (first.deployment.http.host, first.deployment.http.port) == ("::", 81)
    assert (both, one) == (("frontend", "workers"), ("workers",))


def test_a_load_on_nobody_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "http://127.0.0.1:1"]) == 1
    assert capsys.readouterr().err == (
        "foveal bench: no server with a model answers at http://127.0.0.1:1: "
        "Connection refused\n"
    )
