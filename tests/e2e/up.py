"""``foveal up`` for a shipped file, as an operator would start it; with mock engines."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.cases import CHAT
from tests.e2e.fleet import ENGINE_ENV, ROOT
from tests.e2e.processes import Process, wait_until

READY_SECONDS = 300.0
MOCK = {
    "engine": {"dtype": "float32", "block-size": 32, "max-model-len": 8192},
    "environment": ENGINE_ENV,
}
MOCK_OPTIONS = {
    "engine": "mock", "mock-speed": 20, "num-gpu-blocks-override": 200, "enforce-eager": True
}


class Up:
    """``foveal up`` in a directory of its own."""

    def __init__(
        self, directory: Path, name: str, port: int, overrides: dict[str, Any], *flags: str
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        settings = [f"{key}={json.dumps(value)}" for key, value in overrides.items()]
        command = [
            sys.executable, "-m", "configs", "up", str(ROOT / "configs" / f"{name}.yaml"),
            "--port", str(port), *flags, *(a for s in settings for a in ("--set", s)),
        ]
        self.logs = directory / ".foveal" / name / "logs"
        self.url = f"http://127.0.0.1:{port}"
        self.process = Process(
            command, directory / "up.log", {**os.environ, "PYTHONPATH": str(ROOT)}, directory
        )

    def said(self) -> str:
        return self.process.log.read_text()

    def wait_until_said(self, words: str, seconds: float = READY_SECONDS) -> None:
        def is_said() -> bool:
            assert self.process.exit_status is None, self.everything()
            return words in self.said()

        try:
            wait_until(is_said, seconds, words)
        except TimeoutError:
            print(self.everything())
            raise

    def fleet(self) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(f"{self.url}/v1/fleet", timeout=20).json()
        return answer

    def ready(self) -> list[dict[str, Any]]:
        return [worker for worker in self.fleet()["workers"] if worker["ready"]]

    def pids(self) -> list[int]:
        return [int(pid) for pid in re.findall(r"process (\d+)", self.said())]

    def everything(self) -> str:
        logs = {log: log.read_text()[-3000:] for log in self.logs.glob("*.log")}
        return "\n".join([self.said(), *(f"--- {log}\n{text}" for log, text in logs.items())])

    def end(self) -> None:
        """End it, and see to it that nothing is left."""
        pids = self.pids()
        self.process.signal(signal.SIGTERM)
        assert self.process.wait(60.0) == 0, self.everything()
        assert self.said().splitlines()[-1] == "Stopped"
        wait_until(
            lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 5.0, "all gone"
        )
        left = [p for pid in pids for p in Path("/dev/shm").glob(f"foveal-{pid}-*")]
        assert left == []


def mocked(checkpoint: Path, workers: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    options = [{**MOCK_OPTIONS, **each} for each in workers or [{}]]
    return {
        "model": str(checkpoint),
        **MOCK,
        "frontend.options.mm-arena-gb": 0.25,
        "frontend.options.mm-preprocess-workers": 0,
        "workers": [{"count": 2, "options": each} for each in options],
    }


def ask(up: Up, key: str = "") -> httpx.Response:
    request = json.loads((up.logs.parent / "request.json").read_text())
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.post(f"{up.url}{CHAT}", json=request, headers=headers, timeout=120)
