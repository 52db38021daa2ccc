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
from threading import Event, RLock, Thread
from typing import Any, TextIO

MOST_WAITING = 16 << 20
"""Characters, and some for each piece: what comes beyond them is dropped, and counted."""

PIECE = 64
"""What a piece of text takes beside its characters."""

LAST_SECONDS = 2.0
"""How long the end of the process waits for what has not been written yet."""


class QueuedStream:
    """Takes the place of a text stream; its writes return at once."""

    def __init__(
        self, stream: TextIO, most_waiting: int = MOST_WAITING, *, queues: bool = True
    ) -> None:
        self._stream = stream
        self._most_waiting = most_waiting
        self.queues = queues
        """Else whoever writes waits until it is written."""
        self._begin()
        os.register_at_fork(after_in_child=self._begin_in_child)

    def _begin(self, *, forked: bool = False) -> None:
        self._forked = forked
        self._waiting: SimpleQueue[str | Event] = SimpleQueue()
        self._taken = 0
        self._dropped = 0
        self._counting = RLock()  # what is said by a finalizer comes in between
        self._writer: Thread | None = None

    def _begin_in_child(self) -> None:
        # Threads stay behind. A new one begins with the first word: most children say
        # nothing before they become another program.
        self._begin(forked=True)

    def write(self, text: str) -> int:
        """Raises: TypeError: it is no text."""
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if not self.queues:
            self._write_out(text)
        elif self._has_room(text):
            self._put(text)
        return len(text)

    def _has_room(self, text: str) -> bool:
        size = len(text) + PIECE
        with self._counting:
            if self._taken and self._taken + size > self._most_waiting:
                self._dropped += 1
                return False
            self._taken += size
            return True

    def _put(self, piece: str | Event) -> None:
        self._waiting.put(piece)
        with self._counting:
            if self._writer is None:
                self._writer = Thread(target=self._write_all, name="log", daemon=True)
                self._writer.start()

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """The thread does it after each write. Forked children may end without notice: they
        wait for it."""
        if self._forked:
            self.drain(LAST_SECONDS)

    def drain(self, seconds: float) -> bool:
        """Wait until all that was written so far is out; False if it takes longer."""
        if self._writer is None:
            return True
        written = Event()
        self._put(written)
        return written.wait(seconds)

    def end(self, seconds: float) -> None:
        """Drain; if that succeeds, what comes now is written at once: threads end soon."""
        self.queues = not self.drain(seconds)

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
                self._taken -= sum(len(piece) + PIECE for piece in pieces)
                dropped, self._dropped = self._dropped, 0
            if dropped:
                pieces.append(f"... {dropped} lines were dropped here: nobody reads\n")
            self._write_out("".join(pieces))
            for each in drained:
                each.set()

    def _next(self) -> str | Event | None:
        with suppress(Empty):
            return self._waiting.get_nowait()
        return None

    def _write_out(self, text: str) -> None:
        with suppress(OSError, ValueError):  # whoever reads is gone, or it is closed
            try:
                self._stream.write(text)
            except UnicodeEncodeError:  # one character must not cost the other lines
                encoding = self._stream.encoding
                text = text.encode(encoding, "backslashreplace").decode(encoding)
                self._stream.write(text)
            self._stream.flush()


def replace_output() -> None:
    """Have this process say everything through streams that can queue.

    Call it before logging is set up: handlers keep the streams that they find.
    """
    for name in ("stdout", "stderr"):
        stream: TextIO | None = getattr(sys, name)
        if stream is not None:  # None: it was closed when the process began
            replaced = QueuedStream(stream, queues=False)
            setattr(sys, name, replaced)
            atexit.register(replaced.end, LAST_SECONDS)


def queue_output() -> None:
    """From now on have threads write what this process says.

    Call it when there is something to serve. What is only printed, as help is, may be read
    as slowly as one likes.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, QueuedStream):
            stream.queues = True
