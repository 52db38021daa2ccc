"""vLLM's own message queue, with and without naps."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from vllm.distributed.device_communicators import shm_broadcast
from vllm.platforms import current_platform

from workers import engine_polling
from workers.engine_polling import NappingCondition, nap_instead_of_polling

WAITED_S = 0.4


class Queue:
    """One writer, and one reader that has just read a message."""

    def __init__(self) -> None:
        self.writer = shm_broadcast.MessageQueue(1, 1, max_chunk_bytes=1 << 16, max_chunks=4)
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


@pytest.fixture(autouse=True)
def vllms_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what a worker class that was made in this process has set."""
    monkeypatch.setattr(shm_broadcast, "SpinCondition", engine_polling._SpinCondition)


@pytest.fixture
def napping(vllms_condition: None) -> Iterator[Queue]:
    nap_instead_of_polling()
    queue = Queue()
    assert isinstance(queue.reader._spin_condition, NappingCondition)
    yield queue


def test_a_reader_that_waits_leaves_the_core_to_others(napping: Queue) -> None:
    assert napping.cpu_of_waiting() < WAITED_S / 4


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
    """ZeroMQ drops the notice of a message that soon follows another one."""
    monkeypatch.setattr(napping.writer._spin_condition, "notify", lambda: None)
    napping.reader._spin_condition.record_read()
    napping.writer.enqueue("unannounced")
    assert napping.reader.dequeue(timeout=0.5) == "unannounced"


def test_a_cancelled_wait_ends(napping: Queue) -> None:
    napping.reader._spin_condition.last_read -= 10  # long idle: vLLM's own wait
    threading.Timer(0.05, napping.reader.shutdown).start()
    with pytest.raises(RuntimeError, match="cancelled"):
        napping.reader.dequeue(indefinite=True)


def test_engines_on_other_devices_poll_as_vllm_does(monkeypatch: pytest.MonkeyPatch) -> None:
    before = shm_broadcast.SpinCondition
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    nap_instead_of_polling()
    assert shm_broadcast.SpinCondition is before
