"""Notices between threads and processes, by the kernel's futex."""

from __future__ import annotations

import errno
import mmap
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


def test_nothing_is_left_of_it(path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    giver = Notice(path, create=True)
    reader = Notice(path, create=False)
    with pytest.raises(FileExistsError):
        Notice(path, create=True)
    del giver, reader
    assert not os.path.lexists(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_it_has_its_memory_from_the_start(path: Path) -> None:
    """To write to a page that has none when there is none would kill the process."""
    giver = Notice(path, create=True)
    assert path.stat().st_blocks > 0
    assert giver is not None


def test_that_there_is_no_memory_is_told_at_once(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def has_none(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "posix_fallocate", has_none)
    with pytest.raises(OSError, match="full"):
        Notice(path, create=True)
    assert not os.path.lexists(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_it_cannot_be_cut_off(path: Path) -> None:
    """Who reads beyond the end of a mapped file is killed."""
    giver = Notice(path, create=True)
    with pytest.raises(PermissionError):
        os.truncate(path, 0)
    assert giver is not None


@pytest.mark.parametrize(
    "what", ["nothing", "a file", "unsealed memory", "another notice", "somebody else's"]
)
def test_what_is_not_ours_is_not_read(
    path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    giver: object = None
    match what:
        case "a file":
            path.write_bytes(bytes(mmap.PAGESIZE))
        case "unsealed memory":
            giver = os.memfd_create("test")
            os.truncate(giver, mmap.PAGESIZE)
            path.symlink_to(f"/proc/self/fd/{giver}")
        case "another notice":  # of which the link tells where processes are numbered anew
            giver = Notice(other := path.with_name("other"), create=True)
            path.symlink_to(other.readlink())
        case "somebody else's":
            giver = Notice(path, create=True)
            monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError):
        Notice(path, create=False)
    assert len(os.listdir("/proc/self/fd")) == before
    if isinstance(giver, int):
        os.close(giver)


def test_a_forked_child_does_not_withdraw_what_is_its_parents(path: Path) -> None:
    giver = Notice(path, create=True)
    forks = (
        "import os, sys, pathlib; from workers.notice import Notice\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "notice = Notice(path, create=True)\n"
        "if (child := os.fork()) == 0:\n"
        "    sys.exit()\n"
        "os.waitpid(child, 0)\n"
        "print(path.is_symlink() and path.exists())\n"
    )
    other = path.with_name("other")
    told = subprocess.check_output([sys.executable, "-c", forks, str(other)])
    assert told == b"True\n"
    assert not os.path.lexists(other)
    assert giver is not None and path.exists()


def test_a_system_without_it_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notice, "_NUMBER_OF_FUTEX", None)
    with pytest.raises(OSError, match="no futex"):
        Notice(path, create=True)
    assert not os.path.lexists(path)


def test_a_system_that_refuses_to_wait_says_so(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Notice(path, create=True)
    monkeypatch.setattr(notice, "_NUMBER_OF_FUTEX", 10**6)  # no such call
    with pytest.raises(OSError):
        reader.wait(0.1)
