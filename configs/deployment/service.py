"""A process that is kept running: started again when it ends, after longer and longer."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from configs.deployment.children import Child
from configs.deployment.commands import Command

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0
"""Between an end and the next start; doubled each time, ..."""
STEADY_SECONDS = 60.0
"""... until it has run for this long."""
BAD_SETTING = 2
"""Exit status that starting again would not change."""


class ServiceFailed(Exception):
    """It cannot work; the text has the end of its log."""


class Service:
    """One command and the process that runs it at the moment."""

    def __init__(
        self,
        command: Command,
        log: Path,
        environment: dict[str, str],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``environment`` is beneath the command's own."""
        self.name = command.name
        self.log = log
        self.child: Child | None = None
        self.past: list[int] = []
        """Process ids of those that ended."""
        self._command = command
        self._environment = {**environment, **command.environment}
        self._say = say
        self._clock = clock
        self._began = 0.0
        self._pause = FIRST_PAUSE_SECONDS
        self._next_start = 0.0

    @property
    def running(self) -> bool:
        return self.child is not None and self.child.running

    def start(self) -> None:
        again = self.child is not None
        self.child = Child(
            self.name, self._command.line, self.log, self._environment, append=again
        )
        self._began = self._clock()
        self._next_start = 0.0
        self._say(f"Started {self.name}{' again' if again else ''}, process {self.child.pid}")

    def must_run(self) -> None:
        """
        Raises:
            ServiceFailed: it has ended.
        """
        if not self.running:
            raise ServiceFailed(self.last_words())

    def look_after(self) -> None:
        """Note its end, and start it again when that is due.

        Raises:
            ServiceFailed: it says itself that its settings cannot work.
        """
        if self.child is None or self.child.running:
            return
        now = self._clock()
        if not self._next_start:
            if self.child.exit_status == BAD_SETTING:
                raise ServiceFailed(self.last_words())
            self.child.kill_group()  # whatever it has left running
            self.past.append(self.child.pid)
            if now - self._began >= STEADY_SECONDS:
                self._pause = FIRST_PAUSE_SECONDS
            self._say(
                f"{self.name} ended ({self.child.how_it_ended()}); starts again in "
                f"{self._pause:.0f} s; see {self.log}"
            )
            self._next_start = now + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        elif now >= self._next_start:
            self.start()

    def last_words(self, count: int = 30) -> str:
        if self.child is None:
            return f"{self.name} was never started"
        lines = "\n".join(f"  | {line}" for line in self.child.last_lines(count))
        return (
            f"{self.name} ended ({self.child.how_it_ended()}); the end of {self.log}:\n{lines}"
        )

    def last_line(self) -> str:
        lines = self.child.last_lines(1) if self.child is not None else []
        return lines[0].rpartition("\r")[2] if lines else ""
