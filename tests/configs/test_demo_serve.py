"""The demo's process handling, with small stand-ins for the frontend and the workers."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.demo.checkpoint import RECIPE_STAMP, recipe
from configs.deployment.children import Child, stop_all

ROOT = Path(__file__).parents[2]

FRONTEND = """
import http.server, json, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"workers": [{"ready": True}] * 2}).encode())
print("log line", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""
WORKER = "import time; time.sleep(600)"
FAILING = "import sys; print('no such model', flush=True); sys.exit(7)"
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(helper.pid, flush=True)
time.sleep(600)
"""

DEMO = """
import sys
from pathlib import Path
from configs.demo import serve
def commands(host, port, checkpoint, registry):
    frontend, worker = {frontend!r}, {worker!r}
    return [
        ("frontend", [sys.executable, "-c", frontend, str(port)]),
        ("worker-1", [sys.executable, "-c", {first!r}]),
        ("worker-2", [sys.executable, "-c", worker]),
    ]
serve.demo_commands = commands
sys.exit(serve.main())
"""


def script(*, frontend: str = FRONTEND, first: str = WORKER) -> str:
    return DEMO.format(frontend=frontend, worker=WORKER, first=first)


class Demo:
    """`python -m configs.demo.serve` in a directory of its own, with other commands."""

    def __init__(self, directory: Path, source: str, port: int) -> None:
        checkpoint = directory / ".demo" / "checkpoint"
        checkpoint.mkdir(parents=True)
        (checkpoint / RECIPE_STAMP).write_text(recipe())
        self.directory = directory
        self.temporary = directory / "tmp"
        self.temporary.mkdir()
        self.process = subprocess.Popen(
            [sys.executable, "-c", source, "--port", str(port)],
            cwd=directory,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.pids: dict[str, int] = {}

    def read_until(self, words: str) -> str:
        assert self.process.stdout is not None
        read = ""
        for line in self.process.stdout:
            read += line
            if line.startswith("Started "):
                name, _, pid = line.removeprefix("Started ").partition(", process ")
                self.pids[name] = int(pid)
            if words in line:
                return read
        raise AssertionError(f"no {words!r} in: {read}")

    def stop(self) -> str:
        self.process.send_signal(signal.SIGTERM)
        return self.process.communicate(timeout=30)[0]

    def registry_left(self) -> list[Path]:
        return list(Path("/tmp").glob(f"foveal-demo-{self.process.pid}-*"))


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free: int = probe.getsockname()[1]
        return free


@pytest.fixture
def demo(tmp_path: Path, port: int) -> Iterator[Demo]:
    demo = Demo(tmp_path, script(), port)
    yield demo
    if demo.process.poll() is None:
        demo.stop()
    if demo.process.stdout is not None:
        demo.process.stdout.close()


def wait_until_gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True
        if stat.rpartition(")")[2].split()[0] == "Z":  # dead; only init has not looked yet
            return True
        time.sleep(0.02)
    return False


def test_it_announces_a_request_that_can_be_pasted(demo: Demo, port: int) -> None:
    said = demo.read_until("Ctrl-C stops it")
    request = demo.directory / ".demo" / "request.json"
    assert f"http://127.0.0.1:{port}/v1/chat/completions" in said
    assert f"@{request}" in said
    assert "data:image/png;base64," in request.read_text()


def test_sigterm_ends_everything(demo: Demo) -> None:
    demo.read_until("Ctrl-C stops it")
    assert sorted(demo.pids) == ["frontend", "worker-1", "worker-2"]
    assert demo.stop().splitlines()[-1] == "Stopped"
    assert demo.process.returncode == 0
    assert all(wait_until_gone(pid) for pid in demo.pids.values())
    assert demo.registry_left() == []


def test_children_do_not_outlive_a_killed_demo(demo: Demo) -> None:
    demo.read_until("Ctrl-C stops it")
    demo.process.kill()
    demo.process.wait()
    assert all(wait_until_gone(pid) for pid in demo.pids.values())
    for left in demo.registry_left():
        left.rmdir()


def test_a_lost_worker_is_reported_and_the_rest_goes_on(demo: Demo) -> None:
    demo.read_until("Ctrl-C stops it")
    os.kill(demo.pids["worker-2"], signal.SIGKILL)
    assert "worker-2 ended (killed by SIGKILL)" in demo.read_until("worker-2 ended")
    assert demo.process.poll() is None


def test_a_child_that_fails_at_start_is_named_with_its_last_words(
    tmp_path: Path, port: int
) -> None:
    demo = Demo(tmp_path, script(frontend=WORKER, first=FAILING), port)
    said, _ = demo.process.communicate(timeout=30)
    assert demo.process.returncode == 1
    assert "worker-1 ended (exit status 7)" in said
    assert "| no such model" in said
    assert "Traceback" not in said
    assert demo.registry_left() == []


def test_a_taken_port_is_one_sentence_before_anything_starts(
    tmp_path: Path, port: int
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        demo = Demo(tmp_path, script(), port)
        said, _ = demo.process.communicate(timeout=30)
    assert demo.process.returncode == 1
    assert said.splitlines() == [
        f"make serve: Cannot listen on 127.0.0.1 port {port}: Address already in use; "
        "take another port, as in `make serve PORT=8010`"
    ]
    assert not (tmp_path / ".demo" / "logs").exists()


def test_a_stubborn_child_is_killed_with_all_it_started(tmp_path: Path) -> None:
    log = tmp_path / "stubborn.log"
    child = Child("stubborn", [sys.executable, "-c", STUBBORN], log, {})
    while not child.last_lines(1):
        time.sleep(0.02)
    [helper] = map(int, child.last_lines(1))
    assert stop_all([child], patience=0.2) == [child]
    assert child.how_it_ended() == "killed by SIGKILL"
    assert wait_until_gone(helper)


def test_a_second_signal_ends_the_patience(tmp_path: Path) -> None:
    child = Child("stubborn", [sys.executable, "-c", STUBBORN], tmp_path / "log", {})
    while not child.last_lines(1):
        time.sleep(0.02)
    assert stop_all([child], patience=600, hurry=lambda: True) == [child]
