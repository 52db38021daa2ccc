"""Ctrl-C, SIGTERM and SIGHUP, counted instead of obeyed at once."""

import signal
from types import FrameType


class StopSignals:
    """One signal asks to stop, a second one to hurry."""

    def __init__(self) -> None:
        self._count = 0
        self.install()

    def install(self) -> None:
        """Take the signals; once more, where a library has taken them meanwhile."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._received)

    def _received(self, number: int, frame: FrameType | None) -> None:
        self._count += 1

    def stop(self) -> bool:
        return self._count > 0

    def hurry(self) -> bool:
        return self._count > 1
