"""Starts the servers that benchmarks measure, waits for them, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import http.client
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from benchmarks.client import BadAnswer, Client
from configs.demo.checkpoint import write_checkpoint
from configs.deployment.children import Child, stop_all

ROOT = Path(__file__).parent.parent
CHECKPOINT = ROOT / ".demo" / "checkpoint"

ENVIRONMENT = {
    # Several engines share few cores: one thread each, and no pinning.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # For POST /reset_prefix_cache and the like.
    "VLLM_SERVER_DEV_MODE": "1",
    # Longer than any pause of a benchmark.
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "300",
    "VLLM_LOGGING_LEVEL": "INFO",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
ENGINE_FLAGS = (
    "--dtype", "float32", "--block-size", "32", "--enforce-eager", "--max-model-len", "8192",
)
SECONDS_TO_START = 240.0
SECONDS_TO_STOP = 20.0


class ServerFailed(Exception):
    """A server ended or was not ready in time; the text has the end of its log."""


class Servers:
    """The servers of one benchmark, with a private directory; leaving ends them all."""

    def __init__(self, model: Path | None = None) -> None:
        """``model`` is what they serve; none is the demo's, which is made if need be."""
        if model is None:
            write_checkpoint(CHECKPOINT)
        self._model = str(model or CHECKPOINT)
        base = tempfile.gettempdir()
        # Paths of Unix sockets must fit into 107 bytes.
        self.directory = Path(
            tempfile.mkdtemp(prefix="foveal-bench-", dir=base if len(base) < 24 else "/tmp")
        )
        self.registry = self.directory / "r"
        self._children: list[Child] = []

    def start(self, name: str, *arguments: str) -> Child:
        """Start ``python ARGUMENTS``."""
        return self.start_command(name, [sys.executable, *arguments], ENVIRONMENT)

    def start_command(
        self, name: str, command: Sequence[str], environment: Mapping[str, str]
    ) -> Child:
        """Start ``command`` with ``environment`` added to this process's."""
        log = self.directory / f"{name}.log"
        child = Child(name, command, log, environment)
        self._children.append(child)
        return child

    def start_worker(self, name: str, *flags: str) -> Child:
        return self.start(
            name, "-m", "workers", "--model", self._model,
            "--registry", str(self.registry), *ENGINE_FLAGS, *flags,
        )

    def start_frontend(self, name: str, port: int, *flags: str) -> Child:
        return self.start(
            name, "-m", "frontend", "--dyn-chat-processor", "vllm",
            "--model", self._model, "--registry", str(self.registry),
            "--dtype", "float32", "--http-port", str(port), "--mm-arena-gb", "1",
            "--enable-prompt-tokens-details", *flags,
        )

    def start_plain(self, name: str, port: int) -> Child:
        """Start vLLM's own server, the reference."""
        return self.start(
            name, "-m", "vllm.entrypoints.openai.api_server", "--model", self._model,
            "--port", str(port), "--enable-prompt-tokens-details", *ENGINE_FLAGS,
        )

    def wait(
        self, what: str, ready: Callable[[], bool], seconds: float = SECONDS_TO_START
    ) -> None:
        """Return when ``ready`` does so with true.

        Raises:
            ServerFailed: a server has ended, or the time is over.
        """
        deadline = time.monotonic() + seconds
        while not ready():
            for child in self._children:
                if not child.running:
                    raise ServerFailed(f"{child.name}: {child.how_it_ended()}\n{_end(child)}")
            if time.monotonic() > deadline:
                ends = "\n".join(_end(child) for child in self._children)
                raise ServerFailed(f"{what} not ready after {seconds:.0f} s\n{ends}")
            time.sleep(0.2)

    def stop(self, *children: Child) -> None:
        stop_all(children, SECONDS_TO_STOP)
        self._children = [child for child in self._children if child not in children]

    def close(self) -> None:
        pids = [child.pid for child in self._children]
        self.stop(*self._children)
        for pid in pids:  # those of killed frontends
            for segment in Path("/dev/shm").glob(f"foveal-{pid}-*"):
                segment.unlink(missing_ok=True)
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Servers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def is_up(port: int) -> bool:
    """Whether a server answers that it can serve."""
    with contextlib.suppress(OSError, http.client.HTTPException, BadAnswer):
        with Client(port, timeout=5) as client:
            client.get("/health")
        return True
    return False


def ready_workers(port: int) -> int:
    """How many workers a frontend can use; 0 while it does not answer."""
    with contextlib.suppress(OSError, http.client.HTTPException, BadAnswer):
        with Client(port, timeout=5) as client:
            workers = client.get("/v1/fleet")["workers"]
        return sum(worker["ready"] for worker in workers)
    return 0


def free_ports(count: int) -> Sequence[int]:
    """Ports that nobody listens on at this moment."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _end(child: Child) -> str:
    return "\n".join(f"  {child.name} | {line}" for line in child.last_lines(15))
