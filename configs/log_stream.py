"""Standard output and error of a server, written by a thread of their own.

A write to a pipe or a file lets other threads of the process run, and the event loop gets
its turn back only when they let it; and a reader that does not read would stop it for good.
So what is to be written is queued, and a thread writes it, in order.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from typing import Any, TextIO

MOST_WAITING = 50_000
"""Pieces of text, about a line each: what comes beyond them is dropped, and counted."""

LAST_SECONDS = 2.0
"""How long the end of the process waits for what has not been written yet."""


class QueuedStream:
    """Takes the place of a text stream; its writes return at once."""

    def __init__(self, stream: TextIO, most_waiting: int = MOST_WAITING) -> None:
        self._stream = stream
        self._most_waiting = most_waiting
        self._begin()
        os.register_at_fork(after_in_child=self._begin)  # threads stay behind

    def _begin(self) -> None:
        self._waiting: SimpleQueue[str | Event] = SimpleQueue()
        self._dropped = 0
        self._counting = Lock()
        Thread(target=self._write_all, name="log", daemon=True).start()

    def write(self, text: str) -> int:
        if self._waiting.qsize() < self._most_waiting:
            self._waiting.put(text)
        else:
            with self._counting:
                self._dropped += 1
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """The thread does it after each write."""

    def drain(self, seconds: float) -> bool:
        """Wait until all that was written so far is out; False if it takes longer."""
        written = Event()
        self._waiting.put(written)
        return written.wait(seconds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _write_all(self) -> None:
        while True:
            pieces: list[str] = []
            drained: list[Event] = []
            piece: str | Event | None = self._waiting.get()
            while piece is not None:
                if isinstance(piece, Event):
                    drained.append(piece)
                else:
                    pieces.append(piece)
                piece = self._next()
            with self._counting:
                dropped, self._dropped = self._dropped, 0
            if dropped:
                pieces.append(f"... {dropped} lines were dropped here: nobody reads\n")
            with suppress(OSError, ValueError):  # whoever reads is gone, or it is closed
                self._stream.write("".join(pieces))
                self._stream.flush()
            for each in drained:
                each.set()

    def _next(self) -> str | Event | None:
        with suppress(Empty):
            return self._waiting.get_nowait()
        return None


def queue_output() -> None:
    """From now on have threads write what this process says.

    Call it before logging is set up: handlers keep the streams that they find.
    """
    streams = [QueuedStream(sys.stdout), QueuedStream(sys.stderr)]
    sys.stdout, sys.stderr = streams
    for stream in streams:
        atexit.register(stream.drain, LAST_SECONDS)
