"""The ``foveal`` command."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from configs import cli

ROOT = Path(__file__).parents[2]
DEMO = str(ROOT / "configs" / "demo-cpu.yaml")


def test_it_is_installed_under_its_name() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["foveal"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_ctrl_c_ends_it_without_a_word_from_the_first_moment(tmp_path: Path) -> None:
    """Importing is when most of the first second goes by."""
    slow = tmp_path / "yaml.py"
    slow.write_text("print('importing', flush=True)\nimport time\ntime.sleep(600)\n")
    command = subprocess.Popen(
        [sys.executable, "-m", "configs", "up", DEMO], cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )
    assert command.stdout is not None and command.stdout.readline() == "importing\n"
    command.send_signal(signal.SIGINT)
    said, _ = command.communicate(timeout=30)
    assert said == "" and command.returncode == -signal.SIGINT


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
