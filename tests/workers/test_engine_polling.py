"""vLLM's own message queue, with and without naps."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from vllm.distributed.device_communicators import shm_broadcast
from vllm.platforms import current_platform

from workers import engine_polling, notice
from workers.engine_polling import (
    CROWDED_SECONDS,
    NappingCondition,
    Processors,
    nap_instead_of_polling,
)

WAITED_S = 0.4


class Queue:
    """One writer, and one reader that has just read a message."""

    def __init__(self, between: Callable[[], None] = lambda: None) -> None:
        """``between`` is called when the writer is there, and the reader is not."""
        self.writer = shm_broadcast.MessageQueue(1, 1, max_chunk_bytes=1 << 16, max_chunks=4)
        between()
        self.reader = shm_broadcast.MessageQueue.create_from_handle(
            self.writer.export_handle(), 0
        )
        ready = threading.Thread(target=self.writer.wait_until_ready)
        ready.start()
        self.reader.wait_until_ready()
        ready.join()
        self.writer.enqueue("first")
        assert self.reader.dequeue(timeout=5) == "first"

    def cpu_of_waiting(self) -> float:
        """CPU seconds of this thread while it waits in vain."""
        before = time.thread_time()
        with pytest.raises(TimeoutError):
            self.reader.dequeue(timeout=WAITED_S)
        return time.thread_time() - before

    def wakes_its_reader(self) -> bool:
        """Whether a message that is written meanwhile ends the reader's wait at once."""
        began = time.monotonic()
        writer = threading.Timer(0.2, self.writer.enqueue, ["second"])
        writer.start()
        assert self.reader.dequeue(timeout=20) == "second"
        writer.join()
        return time.monotonic() - began < 5


@pytest.fixture(autouse=True)
def vllms_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what a worker class that was made in this process has set."""
    monkeypatch.setattr(shm_broadcast, "SpinCondition", engine_polling._SpinCondition)


@pytest.fixture
def napping(vllms_condition: None, monkeypatch: pytest.MonkeyPatch) -> Queue:
    """Where others always want the core."""
    nap_instead_of_polling()
    queue = Queue()
    assert isinstance(queue.reader._spin_condition, NappingCondition)
    monkeypatch.setattr(Processors, "give_way", lambda _: True)
    return queue


def test_a_reader_that_waits_leaves_the_core_to_others(napping: Queue) -> None:
    assert napping.cpu_of_waiting() < WAITED_S / 4


def test_nobody_else_wants_the_core_so_it_is_polled_on(
    napping: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Processors, "give_way", lambda _: False)
    monkeypatch.setattr(Processors, "are_short", lambda _: False)
    monkeypatch.setattr(NappingCondition, "_nap", pytest.fail)
    with pytest.raises(TimeoutError):
        napping.reader.dequeue(timeout=WAITED_S)


def test_that_others_wait_for_a_processor_is_seen(
    napping: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    naps: list[float] = []
    monkeypatch.setattr(Processors, "give_way", lambda _: False)
    monkeypatch.setattr(Processors, "are_short", lambda _: True)
    monkeypatch.setattr(NappingCondition, "_nap", lambda _: naps.append(time.monotonic()))
    with pytest.raises(TimeoutError):
        napping.reader.dequeue(timeout=CROWDED_SECONDS)
    assert naps


@pytest.mark.parametrize("told", [None, b"", b"\n", b"0.00 0.00"])
def test_processors_are_not_short_where_the_system_does_not_tell(
    tmp_path: Path, told: bytes | None
) -> None:
    load = tmp_path / "loadavg"
    if told is not None:
        load.write_bytes(told)
    assert not Processors(load).are_short()


@pytest.mark.parametrize("sign", ["give_way", "are_short"])
def test_processors_are_short_when_all_are_busy(sign: str) -> None:
    count = os.cpu_count() or 1
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        processors = Processors()
        deadline = time.monotonic() + 30
        while not getattr(processors, sign)():
            assert time.monotonic() < deadline
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


def test_vllm_would_poll() -> None:
    """If this fails, vLLM has stopped polling and the naps can go."""
    queue = Queue()
    assert not isinstance(queue.reader._spin_condition, NappingCondition)
    before = time.monotonic()
    queue.reader._spin_condition.wait(timeout_ms=1000)
    assert time.monotonic() - before < 0.5


def test_messages_arrive_in_order(napping: Queue) -> None:
    sent = list(range(200))
    writer = threading.Thread(target=lambda: [napping.writer.enqueue(each) for each in sent])
    writer.start()
    assert [napping.reader.dequeue(timeout=5) for _ in sent] == sent
    writer.join()


def test_a_message_without_notice_is_found(
    napping: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should one be lost after all."""
    monkeypatch.setattr(napping.writer._spin_condition, "notify", lambda: None)
    napping.reader._spin_condition.record_read()
    napping.writer.enqueue("unannounced")
    assert napping.reader.dequeue(timeout=0.5) == "unannounced"


def test_the_notice_of_a_message_that_soon_follows_another_comes_too(
    napping: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_polling, "LONGEST_NAP_MS", 500)
    began = time.monotonic()

    def read() -> None:
        for number in range(100):
            assert napping.reader.dequeue(timeout=20) == number
            answered.release()

    answered = threading.Semaphore(0)
    reader = threading.Thread(target=read)
    reader.start()
    for number in range(100):
        napping.writer.enqueue(number)
        assert answered.acquire(timeout=20)
    reader.join()
    assert time.monotonic() - began < 5


def be_vllms() -> None:
    shm_broadcast.SpinCondition = engine_polling._SpinCondition  # type: ignore[misc]


@pytest.mark.parametrize("idle_s", [0, 10])
@pytest.mark.parametrize(
    ("before", "between"),
    [
        (nap_instead_of_polling, lambda: None),
        (nap_instead_of_polling, be_vllms),
        (be_vllms, nap_instead_of_polling),
    ],
    ids=["both ours", "the reader is vLLM's", "the writer is vLLM's"],
)
def test_a_notice_comes_whosever_the_ends_are(
    before: Callable[[], None],
    between: Callable[[], None],
    idle_s: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_polling, "LONGEST_NAP_MS", 10_000)
    monkeypatch.setattr(engine_polling, "LONGEST_SLEEP_MS", 10_000)
    monkeypatch.setattr(Processors, "give_way", lambda _: True)
    before()
    queue = Queue(between)
    queue.reader._spin_condition.last_read -= idle_s
    assert queue.wakes_its_reader()


def test_vllms_socket_is_left_where_ours_is_used(napping: Queue) -> None:
    condition = napping.reader._spin_condition
    napping.writer.enqueue("second")
    assert napping.reader.dequeue(timeout=5) == "second"
    assert not condition.local_notify_socket.poll(200)


def test_a_system_without_futex_has_vllms_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notice, "_NUMBER_OF_FUTEX", None)
    monkeypatch.setattr(engine_polling, "LONGEST_NAP_MS", 10_000)
    monkeypatch.setattr(Processors, "give_way", lambda _: True)
    nap_instead_of_polling()
    assert Queue().wakes_its_reader()


def test_a_cancelled_wait_ends(
    napping: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    napping.reader._spin_condition.last_read -= 10  # idle for long
    began = time.monotonic()
    monkeypatch.setattr(engine_polling, "LONGEST_SLEEP_MS", 10_000)
    threading.Timer(0.05, napping.reader.shutdown).start()
    with pytest.raises(RuntimeError, match="cancelled"):
        napping.reader.dequeue(indefinite=True)
    assert time.monotonic() - began < 5


def test_engines_on_other_devices_poll_as_vllm_does(monkeypatch: pytest.MonkeyPatch) -> None:
    before = shm_broadcast.SpinCondition
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    nap_instead_of_polling()
    assert shm_broadcast.SpinCondition is before
