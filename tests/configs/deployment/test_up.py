"""What ``foveal up`` starts, keeps running and ends; stand-ins are the processes."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.deployment.children import Child, stop_all

ROOT = Path(__file__).parents[3]

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

UP = """
import sys
from configs import cli
from configs.deployment import commands
commands.FRONTEND = [sys.executable, "-c", "import sys; sys.argv[1] = sys.argv["
    "sys.argv.index('--http-port') + 1]\\n" + {frontend!r}]
commands.WORKER = [sys.executable, "-c", {worker!r}]
sys.exit(cli.main(["up", *sys.argv[1:]]))
"""
FILE = {"model": "m", "workers": [{"count": 2}], "environment": {"FOR_ALL": "yes"}}


class Running:
    """`foveal up` in a directory of its own, with other commands."""

    def __init__(
        self,
        directory: Path,
        port: int,
        *flags: str,
        frontend: str = FRONTEND,
        worker: str = WORKER,
        file: dict[str, object] = FILE,
    ) -> None:
        self.directory = directory
        (directory / "name.yaml").write_text(json.dumps(file))  # JSON is YAML
        source = UP.format(frontend=frontend, worker=worker)
        self.process = subprocess.Popen(
            [sys.executable, "-c", source, "name.yaml", "--port", str(port), *flags],
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
            if line.startswith("Started ") and ", process " in line:
                name, _, pid = line.removeprefix("Started ").partition(", process ")
                self.pids[name] = int(pid)
            if words in line:
                return read
        raise AssertionError(f"no {words!r} in: {read}")

    def stop(self) -> str:
        self.process.send_signal(signal.SIGTERM)
        return self.process.communicate(timeout=60)[0]

    def all_it_says(self) -> str:
        return self.process.communicate(timeout=60)[0]

    def registry_left(self) -> list[Path]:
        return list(Path("/tmp").glob(f"foveal-up-{self.process.pid}-*"))


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free: int = probe.getsockname()[1]
        return free


@pytest.fixture
def up(tmp_path: Path, port: int) -> Iterator[Running]:
    up = Running(tmp_path, port)
    yield up
    if up.process.poll() is None:
        up.stop()
    if up.process.stdout is not None:
        up.process.stdout.close()


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


def test_it_announces_a_request_that_can_be_pasted(up: Running, port: int) -> None:
    said = up.read_until("Ctrl-C stops it")
    request = up.directory / ".foveal" / "name" / "request.json"
    assert f"http://127.0.0.1:{port}/v1/chat/completions" in said
    assert f"@{request}" in said
    assert "data:image/png;base64," in request.read_text()
    assert "(model m, 2 workers)" in said


def test_sigterm_ends_everything(up: Running) -> None:
    up.read_until("Ctrl-C stops it")
    assert sorted(up.pids) == ["frontend", "worker-1", "worker-2"]
    assert up.stop().splitlines()[-1] == "Stopped"
    assert up.process.returncode == 0
    assert all(wait_until_gone(pid) for pid in up.pids.values())
    assert up.registry_left() == []


def test_children_do_not_outlive_a_killed_parent(up: Running) -> None:
    up.read_until("Ctrl-C stops it")
    up.process.kill()
    up.process.wait()
    assert all(wait_until_gone(pid) for pid in up.pids.values())
    for left in up.registry_left():
        left.rmdir()


def test_a_lost_worker_is_reported_and_started_again(up: Running) -> None:
    up.read_until("Ctrl-C stops it")
    os.kill(up.pids["worker-2"], signal.SIGKILL)
    said = up.read_until("worker-2 ended")
    assert "worker-2 ended (killed by SIGKILL); starts again in 1 s" in said
    up.read_until("Started worker-2 again")
    assert up.pids["worker-2 again"] != up.pids["worker-2"]
    up.stop()
    assert all(wait_until_gone(pid) for pid in up.pids.values())


def test_shared_memory_of_one_that_was_killed_is_removed(up: Running) -> None:
    up.read_until("Ctrl-C stops it")
    left = Path(f"/dev/shm/foveal-{up.pids['worker-1']}-test")
    left.touch()
    os.kill(up.pids["worker-1"], signal.SIGKILL)
    up.read_until("Started worker-1 again")
    up.stop()
    assert not left.exists()


def test_a_child_that_fails_at_start_is_named_with_its_last_words(
    tmp_path: Path, port: int
) -> None:
    up = Running(tmp_path, port, frontend=WORKER, worker=FAILING)
    said = up.all_it_says()
    assert up.process.returncode == 1
    assert "foveal up: worker-" in said and "ended (exit status 7)" in said
    assert "| no such model" in said
    assert "Traceback" not in said
    assert up.registry_left() == []


def test_a_start_that_takes_too_long_has_failed(tmp_path: Path, port: int) -> None:
    up = Running(tmp_path, port, "--set", "start-timeout=0.5", frontend=WORKER)
    said = up.all_it_says()
    assert up.process.returncode == 1
    assert "foveal up: not ready after 0 s: frontend loading, 0 of 2 workers ready" in said


def test_a_taken_port_is_one_sentence_before_anything_starts(
    tmp_path: Path, port: int
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        up = Running(tmp_path, port)
        said = up.all_it_says()
    assert up.process.returncode == 1
    assert said.splitlines() == [
        f"foveal up: cannot listen on 127.0.0.1 port {port}: Address already in use; take "
        "another port, as in `foveal up --port 8010` or `make serve PORT=8010`"
    ]
    assert not (tmp_path / ".foveal").exists()


def test_what_is_to_be_made_first_is_made_once(tmp_path: Path, port: int) -> None:
    make = "import os; open('made', 'a').write(os.environ['FOR_ALL'])"
    steps = [{"command": ["python", "-c", make], "makes": "made"}]
    for _ in range(2):
        up = Running(tmp_path, port, file={**FILE, "prepare": steps})
        up.read_until("Ctrl-C stops it")
        up.stop()
    assert (tmp_path / "made").read_text() == "yes"


def test_what_cannot_be_made_first_is_said(tmp_path: Path, port: int) -> None:
    steps = [{"command": ["python", "-c", FAILING]}]
    up = Running(tmp_path, port, file={**FILE, "prepare": steps})
    said = up.all_it_says()
    assert up.process.returncode == 1
    assert "failed (exit status 7)" in said and "| no such model" in said
    assert "Started" not in said


def test_parts_on_several_hosts_need_a_meeting_place(tmp_path: Path, port: int) -> None:
    said = Running(tmp_path, port, "--only", "workers").all_it_says()
    assert "name.yaml: with --only, the parts find each other by `discovery`" in said


@pytest.mark.parametrize(
    "part, started, announced",
    [
        ("frontend", ["frontend"], "waiting for workers"),
        ("workers", ["worker-1", "worker-2"], "Started 2 workers after"),
    ],
)
def test_one_part_runs_alone(
    tmp_path: Path, port: int, part: str, started: list[str], announced: str
) -> None:
    file = {**FILE, "registry": str(tmp_path)}
    up = Running(tmp_path, port, "--only", part, file=file)
    assert announced in up.read_until("Ctrl-C stops")
    assert sorted(up.pids) == started
    up.stop()
    assert up.process.returncode == 0


def test_the_format_of_logs_is_passed_on(tmp_path: Path, port: int) -> None:
    tells = "import os; print(os.environ['FOVEAL_LOG_FORMAT'], flush=True);" + WORKER
    up = Running(tmp_path, port, "--set", "logs={format: json, directory: l}", worker=tells)
    up.read_until("Ctrl-C stops it")
    up.stop()
    assert (tmp_path / "l" / "worker-1.log").read_text() == "json\n"


@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize("there_before", [False, True])
def test_only_this_user_may_read_a_log(
    tmp_path: Path, append: bool, there_before: bool
) -> None:
    log = tmp_path / "log"
    umask = os.umask(0)
    try:
        if there_before:
            log.touch()
        says = "print('the prompt')"
        child = Child("child", [sys.executable, "-c", says], log, {}, append=append)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    child.kill_group()


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
