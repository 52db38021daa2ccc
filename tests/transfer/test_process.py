from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from transfer.process import is_alive, process_start_time, same_host_key, wants_to_run


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(["sleep", "60"])
    yield child
    child.kill()
    child.wait()


def test_a_running_process_is_alive_at_its_own_start_time_only(
    sleeper: subprocess.Popen[bytes],
) -> None:
    started = process_start_time(sleeper.pid)
    assert started is not None
    assert is_alive(sleeper.pid, started)
    assert not is_alive(sleeper.pid, started - 1)


def test_start_times_are_ticks_since_boot(sleeper: subprocess.Popen[bytes]) -> None:
    started = process_start_time(sleeper.pid)
    assert started is not None
    seconds = started / os.sysconf("SC_CLK_TCK")
    assert abs(time.clock_gettime(time.CLOCK_BOOTTIME) - seconds) < 30


def test_a_zombie_is_dead(sleeper: subprocess.Popen[bytes]) -> None:
    started = process_start_time(sleeper.pid)
    assert started is not None
    sleeper.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert os.path.exists(f"/proc/{sleeper.pid}")
    assert not is_alive(sleeper.pid, started)


def test_a_process_that_is_gone_has_no_start_time() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert process_start_time(child.pid) is None
    assert not is_alive(child.pid, 0)


def test_a_command_name_with_parentheses_and_spaces_does_not_confuse() -> None:
    script = (
        "import os; open('/proc/self/comm', 'w').write('a) Z 1 (b');"
        "from transfer.process import process_start_time as p; print(p(os.getpid()))"
    )
    before = process_start_time(os.getpid())
    shown = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    assert before is not None
    assert int(shown) >= before


def test_processes_of_one_host_have_one_key() -> None:
    script = "from transfer.process import same_host_key; print(same_host_key(), end='')"
    shown = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    assert shown == same_host_key()
    boot_id, namespace = shown.rsplit("-", 1)
    assert os.readlink("/proc/self/ns/pid") == f"pid:[{namespace}]"
    with open("/proc/sys/kernel/random/boot_id") as file:
        assert file.read().strip() == boot_id


def stops_wanting_to_run(pid: int) -> None:
    deadline = time.monotonic() + 20
    while wants_to_run(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_that_runs_wants_to_and_one_that_sleeps_or_is_stopped_does_not(
    sleeper: subprocess.Popen[bytes],
) -> None:
    assert wants_to_run(os.getpid())
    stops_wanting_to_run(sleeper.pid)  # once it has begun to sleep
    sleeper.send_signal(signal.SIGSTOP)
    stops_wanting_to_run(sleeper.pid)  # once it has woken to hear that
    sleeper.kill()
    sleeper.wait()
    assert not wants_to_run(sleeper.pid)
