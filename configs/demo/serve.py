"""The demo: one frontend and two vLLM workers on the CPU, until Ctrl-C or SIGTERM.

    python -m configs.demo.serve [--host 127.0.0.1] [--port 8000]

The model is generated on first use; it and the logs go to .demo in the current
directory. Nothing else outlives the command: processes, sockets and shared memory go.
"""

import argparse
import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from configs.demo.checkpoint import is_current
from configs.demo.children import Child, stop_all
from configs.demo.progress import Progress
from configs.demo.sample_request import text_request, write_image_request

Commands = Callable[[str, int, Path, Path], list[tuple[str, list[str]]]]

HERE = Path(__file__).parent
MODEL = "foveal-demo"
WORKERS = 2
REGISTRY_PREFIX = "foveal-demo-"
ENVIRONMENT = {
    # Two engines and a frontend share few cores: one thread each, and no pinning.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Everything is on this machine.
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
PATIENCE_TO_START = 900.0
PATIENCE_TO_STOP = 20.0
SHOWN_LOG_LINES = 30


class DemoFailed(Exception):
    """The demo cannot run; the message says why."""


class StopSignals:
    """Counts Ctrl-C, SIGTERM and SIGHUP: one asks to stop, a second one to hurry."""

    def __init__(self) -> None:
        self._count = 0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._received)

    def _received(self, number: int, frame: FrameType | None) -> None:
        self._count += 1

    def stop(self) -> bool:
        return self._count > 0

    def hurry(self) -> bool:
        return self._count > 1


def serve(host: str, port: int, state: Path, commands: Commands) -> None:
    """Run the demo until a signal comes.

    Raises:
        DemoFailed: it cannot start, or a part that it cannot do without has ended.
    """
    check_port(host, port)
    progress, signals = Progress(), StopSignals()
    started: list[Child] = []
    logs = state / "logs"
    with registry_directory() as registry:
        try:
            checkpoint = make_checkpoint(state, started, progress, signals)
            for name, command in commands(host, port, checkpoint, registry):
                if not signals.stop():
                    started.append(Child(name, command, logs / f"{name}.log", ENVIRONMENT))
                    progress.say(f"Started {name}, process {started[-1].pid}")
            if wait_until_ready(started, local_url(host, port), progress, signals):
                announce(host, port, state, progress)
                watch(started, progress, signals)
        finally:
            progress.say("Stopping ...")
            for child in stop_all(started, PATIENCE_TO_STOP, signals.hurry):
                progress.say(f"{child.name} did not stop in time and was killed")
            remove_shared_memory(started)
    progress.say("Stopped")


def check_port(host: str, port: int) -> None:
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise DemoFailed(
            f"Cannot listen on {host} port {port}: {error.strerror}; "
            f"take another port, as in `make serve PORT={8010 if port != 8010 else 8020}`"
        ) from error


def make_checkpoint(
    state: Path, started: list[Child], progress: Progress, signals: StopSignals
) -> Path:
    target = state / "checkpoint"
    if is_current(target):
        return target
    command = [sys.executable, "-m", "configs.demo.checkpoint", str(target)]
    generator = Child("checkpoint", command, state / "logs" / "checkpoint.log", ENVIRONMENT)
    started.append(generator)
    while generator.running and not signals.stop():
        progress.status(f"generating a tiny random Qwen2.5-VL in {target}")
        time.sleep(0.2)
    if not signals.stop():
        if not is_current(target):
            raise DemoFailed(last_words(generator))
        started.remove(generator)
    return target


@contextlib.contextmanager
def registry_directory() -> Iterator[Path]:
    """A directory with a short name: paths of Unix sockets must fit into 107 bytes."""
    base = Path(tempfile.gettempdir())
    if len(str(base)) > 24:
        base = Path("/tmp")
    for left_over in base.glob(f"{REGISTRY_PREFIX}*-*"):
        owner = left_over.name.removeprefix(REGISTRY_PREFIX).partition("-")[0]
        if not Path("/proc", owner).exists():
            shutil.rmtree(left_over, ignore_errors=True)
    path = tempfile.mkdtemp(prefix=f"{REGISTRY_PREFIX}{os.getpid()}-", dir=base)
    try:
        yield Path(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def demo_commands(
    host: str, port: int, checkpoint: Path, registry: Path
) -> list[tuple[str, list[str]]]:
    """What runs under which name; the frontend comes first."""
    shared = ["--model", str(checkpoint), "--registry", str(registry)]
    worker = [sys.executable, "-m", "workers", "--config", str(HERE / "worker.yaml"), *shared]
    frontend = [sys.executable, "-m", "frontend", "--config", str(HERE / "frontend.yaml")]
    frontend += [*shared, "--http-host", host, "--http-port", str(port)]
    named = [(f"worker-{number + 1}", worker) for number in range(WORKERS)]
    return [("frontend", frontend), *named]


def wait_until_ready(
    children: Sequence[Child], url: str, progress: Progress, signals: StopSignals
) -> bool:
    """Wait for the frontend and all workers; false if told to stop instead."""
    while not signals.stop():
        for child in children:
            if not child.running:
                raise DemoFailed(last_words(child))
        fleet = look_at(url)
        if fleet.healthy and fleet.ready >= WORKERS:
            return True
        logs = children[0].log.parent
        state = f"{fleet.ready} of {WORKERS} workers ready"
        if progress.elapsed > PATIENCE_TO_START:
            raise DemoFailed(f"Not ready after {PATIENCE_TO_START:.0f} s: {state}; see {logs}")
        frontend = "frontend up" if fleet.answers else "frontend loading"
        progress.status(f"waiting: {frontend}, {state} (logs: {logs})")
        time.sleep(0.5)
    return False


class Fleet(NamedTuple):
    """What the frontend says of itself and its workers."""

    answers: bool
    healthy: bool
    ready: int


def look_at(url: str) -> Fleet:
    described = fetch(f"{url}/v1/fleet")
    if described is None:
        return Fleet(False, False, 0)
    ready = sum(1 for worker in json.loads(described)["workers"] if worker["ready"])
    return Fleet(True, fetch(f"{url}/health") is not None, ready)


def fetch(url: str) -> bytes | None:
    """The body, if the answer is a 200."""
    # No proxy from the environment may stand between the two.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=5) as answer:
            body: bytes = answer.read()
            return body
    except (OSError, http.client.HTTPException):
        return None


def last_words(child: Child) -> str:
    lines = "\n".join(f"  | {line}" for line in child.last_lines(SHOWN_LOG_LINES))
    return f"{child.name} ended ({child.how_it_ended()}); the end of {child.log}:\n{lines}"


def announce(host: str, port: int, state: Path, progress: Progress) -> None:
    url = local_url(host, port)
    request = state / "request.json"
    write_image_request(request, MODEL)
    curl = f"{url}/v1/chat/completions -H 'Content-Type: application/json' -d"
    progress.say(
        f"Ready after {progress.elapsed:.0f} s: {url} "
        f"(model {MODEL}, {WORKERS} workers, random weights: its answers are noise)\n\n"
        f"A picture; send it twice and compare the x-foveal-* headers:\n"
        f"  curl -si {curl} @{request}\n\n"
        f"Text:\n"
        f"  curl -s {curl} '{json.dumps(text_request(MODEL))}'\n\n"
        f"Ctrl-C stops it."
    )


def local_url(host: str, port: int) -> str:
    """Where the server is reached from this machine."""
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"


def watch(children: Sequence[Child], progress: Progress, signals: StopSignals) -> None:
    """Stay until told to stop. A worker may be lost, as long as another one is there."""
    frontend, *workers = children
    while not signals.stop():
        for worker in [worker for worker in workers if not worker.running]:
            workers.remove(worker)
            progress.say(f"{worker.name} ended ({worker.how_it_ended()}); see {worker.log}")
        if not frontend.running or not workers:
            raise DemoFailed(last_words(children[-1] if frontend.running else frontend))
        time.sleep(0.2)


def remove_shared_memory(children: Sequence[Child]) -> None:
    """What a child could not remove itself because it was killed."""
    for child in children:
        for segment in Path("/dev/shm").glob(f"foveal-{child.pid}-*"):
            segment.unlink(missing_ok=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m configs.demo.serve", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--host", default="127.0.0.1", help="address to serve on")
    parser.add_argument("--port", type=int, default=8000, help="port to serve on")
    arguments = parser.parse_args()
    if not 0 < arguments.port < 65536:
        parser.error(f"--port {arguments.port} is not a port: they go from 1 to 65535")
    try:
        serve(arguments.host, arguments.port, Path.cwd() / ".demo", demo_commands)
    except DemoFailed as failure:
        print(f"make serve: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
