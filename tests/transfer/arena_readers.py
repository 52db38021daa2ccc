"""A process that reads what it is told to from arenas that it has never seen before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from transfer.arena_view import ArenaView
from transfer.errors import StaleRef
from transfer.tensor_ref import ArenaId, EntryRef

SECONDS_TO_END = 30.0


class Task(msgspec.Struct):
    """Read ``ref``, then overwrite what was read with ``scribble`` if that is not empty."""

    arena: ArenaId
    directory: str
    ref: EntryRef
    scribble: bytes = b""


class Answer(msgspec.Struct):
    """The bytes, or None for a stale reference.

    ``still_good`` tells whether the reference was good after they had been copied, too.
    """

    contents: bytes | None
    still_good: bool = False


class Readers:
    """Reads by references, in this process, from one arena at a time."""

    def __init__(self) -> None:
        self._view: ArenaView | None = None

    def carry_out(self, task: Task) -> Answer:
        if self._view is None or self._view.id != task.arena:
            self.close()
            self._view = ArenaView(task.arena, Path(task.directory))
        try:
            memory = self._view.read(task.ref)
        except StaleRef:
            return Answer(None)
        contents = bytes(memory)
        if task.scribble:
            memory[:] = (task.scribble * (memory.nbytes // len(task.scribble) + 1))[
                : memory.nbytes
            ]
        try:
            self._view.check(task.ref)
        except StaleRef:
            return Answer(contents)
        return Answer(contents, still_good=True)

    def close(self) -> None:
        if self._view is not None:
            self._view.close()
            self._view = None


class OtherProcess:
    """The same, in a process of its own."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.transfer.arena_readers"],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def carry_out(self, task: Task) -> Answer:
        self.begin(task)
        return self.result()

    def begin(self, task: Task) -> None:
        """Give it a task without waiting; answers come in order."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(task) + b"\n")
        self._process.stdin.flush()

    def result(self) -> Answer:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the reader has ended"
        return msgspec.json.decode(line, type=Answer)

    def close(self) -> None:
        self._process.communicate(timeout=SECONDS_TO_END)


def main() -> None:
    readers = Readers()
    for line in sys.stdin.buffer:
        answer = readers.carry_out(msgspec.json.decode(line, type=Task))
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
