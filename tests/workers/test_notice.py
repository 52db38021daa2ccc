"""Notices between threads and processes, by the kernel's futex."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from workers import notice
from workers.notice import Notice

LONG_S = 20.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "word"


def test_a_notice_ends_a_wait_in_another_process(path: Path) -> None:
    giver = Notice(path, create=True)
    waits = (
        "import sys, pathlib; from workers.notice import Notice\n"
        "notice = Notice(pathlib.Path(sys.argv[1]), create=False)\n"
        "print('waiting', flush=True)\n"
        f"notice.wait({LONG_S})\n"
    )
    command = [sys.executable, "-c", waits, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=os.getcwd()) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"waiting\n"
        began = time.monotonic()
        giver.give()
        assert process.wait(LONG_S) == 0
        assert time.monotonic() - began < LONG_S / 2


def test_all_who_wait_are_woken(path: Path) -> None:
    giver = Notice(path, create=True)
    readers = [Notice(path, create=False) for _ in range(3)]
    began = time.monotonic()
    threads = [threading.Thread(target=reader.wait, args=(LONG_S,)) for reader in readers]
    for thread in threads:
        thread.start()
    giver.give()
    for thread in threads:
        thread.join()
    assert time.monotonic() - began < LONG_S / 2


def test_a_notice_given_before_the_wait_is_not_lost(path: Path) -> None:
    giver = Notice(path, create=True)
    reader = Notice(path, create=False)
    began = time.monotonic()
    giver.give()
    reader.wait(LONG_S)
    assert time.monotonic() - began < LONG_S / 2


def test_a_notice_ends_one_wait_only(path: Path) -> None:
    giver = Notice(path, create=True)
    reader = Notice(path, create=False)
    giver.give()
    reader.wait(LONG_S)
    began = time.monotonic()
    reader.wait(0.05)
    assert time.monotonic() - began >= 0.05


def test_a_wait_in_vain_ends_and_takes_no_cpu(path: Path) -> None:
    reader = Notice(path, create=True)
    before, began = time.thread_time(), time.monotonic()
    reader.wait(0.3)
    assert time.monotonic() - began >= 0.3
    assert time.thread_time() - before < 0.1


def test_the_count_may_pass_its_end(path: Path) -> None:
    giver = Notice(path, create=True)
    giver._count.value = 2**32 - 1
    reader = Notice(path, create=False)
    giver.give()
    assert giver._count.value == 0
    reader.wait(LONG_S)  # or the test would take that long
    assert reader._seen == 0


def test_only_its_owner_may_use_the_file(path: Path) -> None:
    Notice(path, create=True)  # nobody else has it: it is gone again
    giver = Notice(path, create=True)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        Notice(path, create=True)
    del giver
    assert not path.exists()


def test_a_forked_child_does_not_remove_its_parents_file(path: Path) -> None:
    giver = Notice(path, create=True)
    forks = (
        "import os, sys, pathlib; from workers.notice import Notice\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "notice = Notice(path, create=True)\n"
        "if (child := os.fork()) == 0:\n"
        "    sys.exit()\n"
        "os.waitpid(child, 0)\n"
        "print(path.exists())\n"
    )
    other = path.with_name("other")
    told = subprocess.check_output([sys.executable, "-c", forks, str(other)])
    assert told == b"True\n"
    assert not other.exists()
    assert giver is not None and path.exists()


def test_a_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    giver = Notice(path, create=True)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError):
        Notice(tmp_path / "link", create=False)
    assert giver is not None


def test_a_system_without_it_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notice, "_NUMBER_OF_FUTEX", None)
    with pytest.raises(OSError, match="no futex"):
        Notice(path, create=True)
    assert not path.exists()


def test_a_system_that_refuses_to_wait_says_so(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Notice(path, create=True)
    monkeypatch.setattr(notice, "_NUMBER_OF_FUTEX", 10**6)  # no such call
    with pytest.raises(OSError):
        reader.wait(0.1)
