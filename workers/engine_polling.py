"""Engine processes that give way to others instead of polling.

vLLM's engine and model runner pass messages through shared memory, and each keeps asking
for the next one until a second has passed without any. A GPU leaves the processor idle, so
polling costs nothing there and answers sooner. On CPUs the polling process may take the
core that another one computes on. So it polls as long as there are processors for all who
want one, and sleeps until the writer's notice when there are not.

The notice is ours (``notice``) where both ends are: vLLM's goes through ZeroMQ. A reader of
ours then leaves vLLM's socket, to which the writer still sends for readers that are not.

vLLM names relied on: distributed.device_communicators.shm_broadcast.SpinCondition with
is_reader, last_read, busy_loop_s, wait(timeout_ms), cancel(), notify() and
local_notify_socket; that it is made with notify_address, an ipc:// address of this queue
alone; MessageQueue makes one, by that name, for each of its ends, the writer's first.
"""

from __future__ import annotations

import os
import time
from functools import cached_property
from pathlib import Path
from resource import RUSAGE_THREAD, getrusage

import zmq
from vllm.distributed.device_communicators import shm_broadcast
from vllm.platforms import current_platform

from workers.notice import Notice

_SpinCondition = shm_broadcast.SpinCondition

LONGEST_NAP_MS = 2
"""Should a notice be lost after all, the reader looks again after so long."""
LONGEST_SLEEP_MS = 1000
"""So does one that has been idle for long."""
CROWDED_SECONDS = 0.1
"""So long after others were seen to want processors nobody polls."""
LOOK_SECONDS = 0.0005
"""How often somebody who polls looks whether they do."""
LOADAVG = Path("/proc/loadavg")


class NappingCondition(_SpinCondition):
    """vLLM's condition, which sleeps where that one polls and others want the core."""

    def __init__(
        self,
        is_reader: bool,
        context: zmq.Context[zmq.Socket[bytes]],
        notify_address: str,
        busy_loop_s: float = 1,
    ) -> None:
        super().__init__(is_reader, context, notify_address, busy_loop_s)
        self._crowded_until = 0.0
        self._look_again = 0.0
        self._notice = _notice_at(notify_address, create=not is_reader)
        if is_reader and self._notice is not None:
            self.local_notify_socket.disconnect(notify_address)

    @cached_property
    def _processors(self) -> Processors:
        return Processors()  # not needed at the writer's end

    def wait(self, timeout_ms: int | None = None) -> None:
        now = time.monotonic()
        if now > self.last_read + self.busy_loop_s:
            self._sleep(timeout_ms)
            return
        if now < self._crowded_until:
            self._nap()
            return
        crowded = self._processors.give_way()  # as vLLM does
        if now >= self._look_again:
            self._look_again = now + LOOK_SECONDS
            crowded |= self._processors.are_short()
        if crowded:
            self._crowded_until = now + CROWDED_SECONDS

    def _sleep(self, timeout_ms: int | None) -> None:
        if self._notice is None:
            super().wait(timeout_ms)
        else:
            longest = LONGEST_SLEEP_MS if timeout_ms is None else timeout_ms
            self._notice.wait(min(longest, LONGEST_SLEEP_MS) / 1000)

    def _nap(self) -> None:
        polling_s = self.busy_loop_s
        self.busy_loop_s = -1.0  # vLLM's sleeps at once
        try:
            self._sleep(LONGEST_NAP_MS)
        finally:
            self.busy_loop_s = polling_s

    def cancel(self) -> None:
        super().cancel()
        if self._notice is not None:
            self._notice.give()

    def notify(self) -> None:
        if self._notice is not None:
            self._notice.give()
        # libzmq learns only once in a millisecond or so what the other end has taken, and
        # drops what the socket's limit of one message does not hold. Asking for its events
        # makes it learn now.
        self.local_notify_socket.getsockopt(zmq.EVENTS)
        super().notify()


def _notice_at(address: str, *, create: bool) -> Notice | None:
    """Our own notice beside a socket of vLLM; None where there can be none."""
    if not address.startswith("ipc://"):
        return None
    try:
        return Notice(Path(f"{address.removeprefix('ipc://')}.notice"), create=create)
    except OSError:  # or the writer is vLLM's own
        return None


class Processors:
    """Whether there are enough processors for all threads of this host that want one."""

    def __init__(self, load: Path = LOADAVG) -> None:
        try:
            self._load: int | None = os.open(load, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # some sandboxes have none
            self._load = None
        self._count = os.cpu_count() or 1

    def __del__(self) -> None:
        if self._load is not None:
            os.close(self._load)

    def give_way(self) -> bool:
        """Let others run on this core; tells whether somebody did.

        A thread that goes on wanting to run is counted as switched involuntarily then.
        """
        before = getrusage(RUSAGE_THREAD).ru_nivcsw
        os.sched_yield()
        return getrusage(RUSAGE_THREAD).ru_nivcsw != before

    def are_short(self) -> bool:
        """Whether more threads are running or ready to, this one included, than there are
        processors. The kernel seldom moves one that waits to a core that is polled on.

        False where the system does not tell.
        """
        told = b"" if self._load is None else os.pread(self._load, 64, 0)
        words = told.split()
        return len(words) > 3 and int(words[3].partition(b"/")[0]) > self._count


def nap_instead_of_polling() -> None:
    """Make the message queues of this process, and of those it forks, give way to others.

    Call it before the process makes its queues. Does nothing where the engine computes
    on something other than the CPU.
    """
    if current_platform.is_cpu():
        shm_broadcast.SpinCondition = NappingCondition  # type: ignore[misc]
