"""A deployment: workers and frontends of one registry, and plain vLLM to compare with."""

from __future__ import annotations

import os
import shutil
import ssl
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.processes import Process, accepts, free_port, wait_until

ROOT = Path(__file__).parents[2]
MODEL = "foveal-demo"
BLOCK_SIZE = 32
READY_SECONDS = 400.0
ANSWER_SECONDS = 120.0

WORKER_FLAGS = (
    "--dtype", "float32",
    "--block-size", str(BLOCK_SIZE),
    "--enforce-eager",
    "--max-model-len", "8192",
)
SERVER_FLAGS = (
    "--served-model-name", MODEL,
    "--dtype", "float32",
    "--host", "127.0.0.1",
    "--enable-prompt-tokens-details",
    "--enable-auto-tool-choice",
    "--tool-call-parser", "hermes",
    "--trust-request-mm-kwargs",
)

# Several engines share a few cores here: one thread each, and little memory.
ENGINE_ENV = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


class Server:
    """Something that answers HTTP."""

    def __init__(
        self,
        process: Process,
        port: int,
        socket: Path | None = None,
        certificate: Path | None = None,
        api_key: str | None = None,
    ) -> None:
        """``socket`` is where it listens, for a server on a network of its own.

        ``certificate``: it speaks HTTPS, with this one.
        """
        self.process = process
        self._socket = socket
        self.url = f"{'https' if certificate else 'http'}://127.0.0.1:{port}"
        transport = httpx.HTTPTransport(uds=str(socket)) if socket else None
        self.http = httpx.Client(
            base_url=self.url,
            timeout=ANSWER_SECONDS,
            transport=transport,
            verify=ssl.create_default_context(cafile=certificate) if certificate else True,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
        )

    def is_healthy(self) -> bool:
        try:
            return self.http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def answers(self) -> bool:
        if self._socket is not None and not accepts(self._socket):
            return False  # asked in vain, httpx would leave a socket open
        try:
            self.http.get("/version")
        except httpx.TransportError:
            return False
        return True

    def ask(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        """Post a request that must succeed."""
        response = self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response

    def end(self) -> None:
        self.http.close()
        self.process.end()


class Frontend(Server):
    def fleet(self) -> dict[str, Any]:
        """What ``GET /v1/fleet`` says."""
        answer: dict[str, Any] = self.http.get("/v1/fleet").raise_for_status().json()
        return answer

    def count(self, counter: str) -> float:
        """The value of a counter of ours that has no labels."""
        lines = self.http.get("/metrics").raise_for_status().text.splitlines()
        (line,) = (line for line in lines if line.startswith(f"foveal_{counter}_total "))
        return float(line.split()[1])

    def workers(self) -> dict[str, dict[str, Any]]:
        """Its ready workers by name."""
        return {w["id"]: w for w in self.fleet()["workers"] if w["ready"]}

    def fleet_worker(self, name: str) -> dict[str, Any]:
        """One of its workers, ready or not."""
        found: dict[str, Any] = next(w for w in self.fleet()["workers"] if w["id"] == name)
        return found

    def shared_embeddings(self) -> int:
        """Encoder outputs that the workers' host shares, as far as it knows."""
        return max(worker["shared_embeddings"] for worker in self.workers().values())

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        lines = self.http.get("/metrics").raise_for_status().text.splitlines()
        samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return sum(float(v) for key, _, v in samples if key.partition("{")[0] == name)

    def has_workers(self, count: int) -> bool:
        return self.answers() and len(self.workers()) == count

    def settle(self, still_seconds: float = 0.1) -> None:
        """Wait until no KV delta has come for a while and none is known to be missing."""
        deadline = time.monotonic() + 30.0
        last, since = self._positions(), time.monotonic()
        while time.monotonic() - since < still_seconds:
            assert time.monotonic() < deadline, f"the KV plane never rests: {last}"
            time.sleep(still_seconds / 5)
            now = self._positions()
            if now != last or not all(caught_up for caught_up, _, _ in now.values()):
                last, since = now, time.monotonic()

    def _positions(self) -> dict[str, tuple[bool, int, int]]:
        return {
            name: (worker["kv_caught_up"], worker["kv_seq"], worker["requests"])
            for name, worker in self.workers().items()
        }


class Deployment:
    """Starts processes that find each other, and ends them all."""

    def __init__(self, checkpoint: Path, logs: Path, namespace: str = "e2e") -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self.checkpoint = checkpoint
        self.logs = logs
        self.namespace = namespace
        # Short, because Unix sockets are made in it.
        self.directory = Path(tempfile.mkdtemp(prefix="fv-"))
        self.registry = self.directory / "r"
        self.registry.mkdir(mode=0o700)
        self.processes: list[Process] = []
        self._servers: list[Server] = []

    def start_worker(
        self,
        *flags: str,
        env: Mapping[str, str] | None = None,
        before: Sequence[str] = (),
        name: str = "worker",
    ) -> Process:
        """``before`` is a command that runs the worker, ``unshare`` for example."""
        return self._start(
            name,
            # By default it would take 4 GiB as soon as NIXL is used.
            ["-m", "workers", *self._ours(), *WORKER_FLAGS, "--mm-worker-cache-gb", "0.5",
             *flags],
            {**ENGINE_ENV, **(env or {})},
            before,
        )

    def start_frontend(
        self,
        *flags: str,
        env: Mapping[str, str] | None = None,
        before: Sequence[str] = (),
        socket: bool = False,
        name: str = "frontend",
        certificate: Path | None = None,
        api_key: str | None = None,
    ) -> Frontend:
        """``before`` is a command that runs the frontend, ``unshare`` for example.

        ``certificate`` and ``api_key`` are what its clients need to know. ``socket`` has it
        listen on a file, for when its network is not this one.
        """
        port = free_port()
        path = self.directory / f"{name}.sock" if socket else None
        if path is not None:
            flags = (*flags, "--uds", str(path))
        command = [
            "-m", "frontend", "--dyn-chat-processor", "vllm", "--http-port", str(port),
            "--mm-arena-gb", "0.25", "--mm-url-private-addresses", "allow",
            *self._ours(), *SERVER_FLAGS, *flags,
        ]
        process = self._start(name, command, env or {}, before)
        server = Frontend(process, port, path, certificate, api_key)
        self._servers.append(server)
        return server

    def start_vllm(self, *flags: str, env: Mapping[str, str] | None = None) -> Server:
        """Plain vLLM, to compare with."""
        port = free_port()
        command = [
            "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.checkpoint),
            "--port", str(port), *WORKER_FLAGS, *SERVER_FLAGS, *flags,
        ]
        server = Server(self._start("vllm", command, {**ENGINE_ENV, **(env or {})}), port)
        self._servers.append(server)
        return server

    def await_ready(self, servers: Sequence[Server], workers: int) -> None:
        """Wait until all servers are healthy and the frontends have their workers.

        Raises:
            TimeoutError, AssertionError: they do not get there; the logs say why.
        """

        def is_ready(server: Server) -> bool:
            assert server.process.exit_status is None, server.process.last_lines(40)
            if isinstance(server, Frontend):
                return server.has_workers(workers)
            return server.is_healthy()

        for server in servers:
            name = server.process.log.stem
            wait_until(lambda s=server: is_ready(s), READY_SECONDS, f"{name} ready")

    def left_by(self, *ended: Process) -> list[str]:
        """What processes that have ended left in their temporary directories.

        Torch's cache of compiled headers is meant to stay.
        """
        return [
            str(path)
            for process in ended
            for path in sorted((self.directory / process.log.stem).iterdir())
            if not path.name.startswith("torchinductor_")
        ]

    def announced(self) -> list[str]:
        """What is in the registry, besides the seed that is meant to stay."""
        files = self.registry.glob("*/*")
        return sorted(str(path) for path in files if path.name != "identity-seed")

    def end(self) -> None:
        for server in self._servers:
            server.end()
        for process in reversed(self.processes):
            process.end()
        shutil.rmtree(self.directory, ignore_errors=True)

    def last_lines(self, count: int = 40) -> dict[str, str]:
        """The end of each log, by the name of the process."""
        return {process.log.name: process.last_lines(count) for process in self.processes}

    def _ours(self) -> list[str]:
        return [
            "--model", str(self.checkpoint),
            "--registry", str(self.registry),
            "--namespace", self.namespace,
        ]

    def _start(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
        before: Sequence[str] = (),
    ) -> Process:
        title = f"{name}-{len(self.processes) + 1}"
        temporary = self.directory / title
        temporary.mkdir()
        process = Process(
            [*before, sys.executable, *command],
            self.logs / f"{title}.log",
            {**os.environ, "TMPDIR": str(temporary), **env},
            ROOT,
        )
        self.processes.append(process)
        return process
