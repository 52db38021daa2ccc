"""A watch calls back when a process ends, at once and only once."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.fakes import within
from transfer import process as process_module
from transfer.process import Process, process_start_time, same_host_key
from transfer.process_watch import watch_process

pytestmark = pytest.mark.anyio


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def start_of(process: subprocess.Popen[bytes]) -> int:
    start_time = process_start_time(process.pid)
    assert start_time is not None
    return start_time


async def test_the_end_of_a_process_is_heard_of(other: subprocess.Popen[bytes]) -> None:
    ended = asyncio.Event()
    watch = watch_process(other.pid, start_of(other), ended.set)
    assert watch is not None
    await asyncio.sleep(0)
    assert not ended.is_set()
    other.kill()
    await within(ended.wait())
    watch.close()


async def test_a_closed_watch_is_silent(other: subprocess.Popen[bytes]) -> None:
    heard: list[str] = []
    closed = watch_process(other.pid, start_of(other), lambda: heard.append("closed"))
    ended = asyncio.Event()
    watch = watch_process(other.pid, start_of(other), ended.set)
    assert closed is not None and watch is not None
    closed.close()
    closed.close()
    other.kill()
    await within(ended.wait())
    assert heard == []


async def test_a_process_that_is_gone_is_told_of_soon(other: subprocess.Popen[bytes]) -> None:
    start_time = start_of(other)
    other.kill()
    other.wait()
    ended = asyncio.Event()
    assert watch_process(other.pid, start_time, ended.set) is None
    assert not ended.is_set()
    await within(ended.wait())


async def test_the_end_of_a_process_that_is_hidden_is_told_of(
    other: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    start_time = start_of(other)
    monkeypatch.setattr(process_module, "process_start_time", lambda _: None)
    monkeypatch.setattr(os, "kill", refuse)
    ended = asyncio.Event()
    watch = watch_process(other.pid, start_time, ended.set)
    assert watch is not None
    assert not Process(pid=other.pid, start_time=start_time, host=same_host_key()).is_dead()
    monkeypatch.undo()
    other.kill()
    await within(ended.wait())


def refuse(*_: int) -> None:
    raise PermissionError


async def test_another_process_of_the_same_id_counts_as_gone(
    other: subprocess.Popen[bytes],
) -> None:
    ended = asyncio.Event()
    assert watch_process(other.pid, start_of(other) - 1, ended.set) is None
    await within(ended.wait())
