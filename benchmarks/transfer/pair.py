"""The two processes of a pair, as the benchmark sees them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import msgspec
import zmq

from benchmarks.metrics import CannotMeasure
from benchmarks.transfer.endpoint import Order, Result
from configs.deployment.children import Child, stop_all

ROOT = Path(__file__).parent.parent.parent
SHM = Path("/dev/shm")
ROLES = ("receiver", "sender")
SECONDS_TO_START = 240.0
SECONDS_TO_ANSWER = 90.0
SECONDS_TO_STOP = 10.0

ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class WayFailed(Exception):
    """A way does not work here; the text says what it said."""


class Pair:
    """A sender and a receiver process, started at once and waited for by ``wait``.

    While a pair is paused its processes get no processor time: one that spins in the
    background would otherwise slow the others.
    """

    def __init__(self, name: str, python: Path) -> None:
        self.name = name
        self._directory = Path(tempfile.mkdtemp(prefix="foveal-bench-", dir="/tmp"))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._lines: dict[str, zmq.Socket[bytes]] = {}
        self._children: list[Child] = []
        for role in ROLES:
            line = self._lines[role] = self._context.socket(zmq.PAIR)
            line.setsockopt(zmq.LINGER, 0)
            line.bind(f"ipc://{self._directory}/{role}")
            command = [
                str(python), "-m", "benchmarks.transfer.endpoint", role, str(self._directory)
            ]
            log = self._directory / f"{role}.log"
            self._children.append(Child(f"{name} {role}", command, log, ENVIRONMENT))

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._children]

    def wait(self) -> None:
        """Return when both processes are up.

        Raises:
            CannotMeasure: one of them has ended, or it takes too long.
        """
        for role in ROLES:
            self._receive(role, SECONDS_TO_START, CannotMeasure)

    def open(self, way: str) -> None:
        """Make both processes ready for ``way``.

        Raises:
            WayFailed: it does not work here.
        """
        self._order(Order(way))

    def hand_over(
        self, way: str, nbytes: int, number: int, *, again: bool = False, pause: bool = True
    ) -> Result:
        """Have one item handed over.

        Raises:
            WayFailed: it did not arrive, or not as it was sent.
        """
        return self._order(Order(way, nbytes, number, again, pause))

    def pause(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGCONT)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.resume()
        with contextlib.suppress(zmq.Again):
            self._lines["sender"].send(b"", zmq.NOBLOCK)
        deadline = time.monotonic() + SECONDS_TO_STOP
        while any(child.running for child in self._children) and time.monotonic() < deadline:
            time.sleep(0.05)
        stop_all(self._children, SECONDS_TO_STOP)
        for pid in self.pids:  # what killed ones have left
            for pattern in (f"foveal-{pid}-*", f"mm_kwargs_{pid}_*"):
                for segment in SHM.glob(pattern):
                    segment.unlink(missing_ok=True)
        self._context.destroy(linger=0)
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Pair:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _order(self, order: Order) -> Result:
        self._lines["sender"].send(msgspec.msgpack.encode(order))
        frame = self._receive("sender", SECONDS_TO_ANSWER, WayFailed)
        result = msgspec.msgpack.decode(frame, type=Result)
        if result.error:
            raise WayFailed(result.error)
        return result

    def _receive(
        self, role: str, seconds: float, failure: Callable[[str], Exception]
    ) -> bytes:
        deadline = time.monotonic() + seconds
        while not self._lines[role].poll(200):
            for child in self._children:
                if not child.running:
                    raise failure(f"{child.name}: {child.how_it_ended()}; {_end(child)}")
            if time.monotonic() > deadline:
                raise failure(f"{self.name} {role}: no answer after {seconds:.0f} s")
        return self._lines[role].recv()


def _end(child: Child) -> str:
    return " | ".join(child.last_lines(3))
