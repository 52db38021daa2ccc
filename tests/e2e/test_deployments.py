"""The shipped files of configs/, started by ``foveal up`` with mock engines.

A file is taken as it is but for what needs GPUs, another host or a large model: that is
changed by ``--set``, as an operator would.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.schema import FrontendConfig, WorkerConfig
from tests.e2e.fleet import ROOT
from tests.e2e.processes import free_port, wait_until
from tests.e2e.up import READY_SECONDS, Up, ask, mocked
from tests.etcd_server import EtcdServer

needs_keys = pytest.mark.skipif(
    "secure_keys" not in FrontendConfig.model_fields, reason="NO --secure-keys yet"
)


@pytest.fixture
def ups() -> Iterator[list[Up]]:
    """Those that run: ended whatever happens."""
    running: list[Up] = []
    yield running
    for up in running:
        up.process.end()


def test_single_node_shm(
    checkpoint: Path, no_session_fleet: None, tmp_path: Path, ups: list[Up]
) -> None:
    logs = {"logs": {"format": "json"}}
    up = Up(
        tmp_path, "single-node-shm", free_port(), {**mocked(checkpoint), **logs}
    )
    ups.append(up)
    up.wait_until_said("Ctrl-C stops it.")
    assert f"(model {checkpoint}, 2 workers)" in up.said()

    answer = ask(up)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-foveal-transfer"] == "shm"

    # Every line of the logs is an event, and one of them is this request.
    identity = answer.headers["x-foveal-request-id"]
    assert answer.json()["id"] in identity
    lines = (up.logs / "frontend.log").read_text().splitlines()
    events = [json.loads(line) for line in lines if line.startswith("{")]
    (event,) = [event for event in events if event.get("request_id") == identity]
    assert event["worker"] == answer.headers["x-foveal-worker"]
    # Libraries that print instead of logging are all that is no event.
    logged = {event["logger"].partition(".")[0] for event in events}
    assert {"frontend", "vllm", "uvicorn"} <= logged
    assert not [x for x in lines if " INFO " in x and not x.startswith("{")]

    status = subprocess.run(
        [sys.executable, "-m", "configs", "status", up.url],
        cwd=ROOT, env={**os.environ, "COLUMNS": "250"}, capture_output=True, text=True,
    )
    assert status.returncode == 0, status.stderr
    assert all(worker["id"] in status.stdout for worker in up.ready())

    figures = tmp_path / "figures.json"
    bench = subprocess.run(
        [
            sys.executable, "-m", "configs", "bench", up.url, "--requests", "8",
            "--concurrency", "2", "--pool", "2", "--width", "280", "--height", "224",
            "--words", "60", "--max-tokens", "4", "--json", str(figures),
        ],
        cwd=ROOT, capture_output=True, text=True,
    )
    assert bench.returncode == 0, bench.stdout + bench.stderr
    measured = json.loads(figures.read_text())
    assert (measured["requests"], measured["errors"]) == (8, 0)
    assert measured["output_tokens"] == 32
    assert measured["cached_tokens"] > 0
    assert measured["transfers"] == {"shm": 8}

    # A worker that is killed is back after a while.
    before = {worker["id"] for worker in up.ready()}
    victim = up.pids()[-1]
    os.kill(victim, signal.SIGKILL)
    up.wait_until_said("Started worker-2 again")
    wait_until(
        lambda: len(up.ready()) == 2 and {w["id"] for w in up.ready()} != before,
        READY_SECONDS, "two workers again",
    )
    up.end()


def test_multi_node_nixl(
    checkpoint: Path, no_session_fleet: None, tmp_path: Path, ups: list[Up], etcd: EtcdServer
) -> None:
    """Frontend and workers by two commands that share etcd and nothing else."""
    # The mock pulls no tensors, so their way falls back; that is said, and works.
    overrides = {
        **mocked(checkpoint, [{"host": "127.0.0.1", "port": 0}]),
        "discovery": etcd.address, "http.host": "127.0.0.1",
    }
    if "insecure" not in WorkerConfig.model_fields:
        overrides["security.insecure"] = False
    port = free_port()
    for part in ("frontend", "workers"):
        ups.append(
            Up(tmp_path / part, "multi-node-nixl", port, overrides, "--only", part)
        )
    frontend, workers = ups
    frontend.wait_until_said("waiting for workers")
    workers.wait_until_said("Started 2 workers")
    wait_until(lambda: len(frontend.ready()) == 2, READY_SECONDS, "workers found by etcd")
    assert all(worker["address"].startswith("tcp://") for worker in frontend.ready())
    answer = ask(frontend)
    assert answer.status_code == 200, answer.text

    # etcd is away for a while: nobody is forgotten, and it goes on afterwards.
    etcd.kill()
    assert ask(frontend).status_code == 200
    assert len(frontend.ready()) == 2
    etcd.start()
    workers.end()
    wait_until(lambda: frontend.fleet()["workers"] == [], 30.0, "workers forgotten")
    frontend.end()


@needs_keys
def test_secure(
    checkpoint: Path, no_session_fleet: None, tmp_path: Path, ups: list[Up],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "a-key")
    overrides = mocked(checkpoint, [{"host": "127.0.0.1", "port": 0}])
    up = Up(tmp_path, "secure", free_port(), overrides)
    ups.append(up)
    up.wait_until_said("Ctrl-C stops it.")
    assert ask(up).status_code == 401
    assert ask(up, "a-key").status_code == 200
    keys = tmp_path / ".foveal" / "keys"
    assert keys.stat().st_mode & 0o077 == 0
    up.end()
