"""Engine processes that wait for each other instead of polling.

vLLM's engine and model runner pass messages through shared memory, and each keeps asking
for the next one until a second has passed without any. A GPU leaves the processor idle, so
polling costs nothing there and answers sooner. On CPUs the polling process takes the core
that the other one computes on.

vLLM names relied on: distributed.device_communicators.shm_broadcast.SpinCondition with
last_read, busy_loop_s and wait(timeout_ms); MessageQueue makes one, by that name, for each
queue that it reads.
"""

from __future__ import annotations

import time

from vllm.distributed.device_communicators import shm_broadcast
from vllm.platforms import current_platform

_SpinCondition = shm_broadcast.SpinCondition

# The writer's socket drops the notice of a message that follows another one within about
# a millisecond, so a notice may never come: look again after this long.
LONGEST_NAP_MS = 2


class NappingCondition(_SpinCondition):
    """vLLM's condition, which sleeps where that one polls, until the writer's notice."""

    def wait(self, timeout_ms: int | None = None) -> None:
        polling_s = self.busy_loop_s
        if time.monotonic() > self.last_read + polling_s:
            super().wait(timeout_ms)
            return
        self.busy_loop_s = -1.0  # vLLM sleeps at once
        try:
            super().wait(LONGEST_NAP_MS)
        finally:
            self.busy_loop_s = polling_s


def nap_instead_of_polling() -> None:
    """Make the message queues of this process, and of those it forks, sleep.

    Call it before the process makes its queues. Does nothing where the engine computes
    on something other than the CPU.
    """
    if current_platform.is_cpu():
        shm_broadcast.SpinCondition = NappingCondition  # type: ignore[misc]
