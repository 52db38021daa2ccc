"""A process that owns an arena and offers it, as a frontend of another host does."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.fakes_nixl import PATIENCE, cpu_seconds, identity_of
from transfer.arena import Arena
from transfer.leases import Lease
from transfer.nixl.export import ArenaExport
from transfer.tensor_ref import EntryRef, RemoteArena


def _serve(commands: Connection, nbytes: int) -> None:
    """Do what the other end of ``commands`` says, until it says nothing more."""
    with Arena(nbytes, populate=False) as arena:
        export = ArenaExport(arena)
        leases: list[Lease] = []

        def put(contents: bytes) -> EntryRef:
            reservation = arena.reserve(len(contents))
            reservation.memory[:] = contents
            leases.append(reservation.seal(identity_of(contents)))
            return leases[-1].entry

        def forget() -> None:
            for lease in leases:
                lease.release()
            leases.clear()
            arena.drop_unleased()

        actions = {
            "put": put,
            "forget": forget,
            "progress_for": export.progress_for,
            "busy": lambda: export.busy,
            "cpu_seconds": cpu_seconds,
        }
        commands.send(export.remote)
        while True:
            try:
                name, arguments = commands.recv()
            except EOFError:
                break
            commands.send(actions[name](*arguments))
        export.close()


class Owner:
    """The process, seen from here."""

    def __init__(self, nbytes: int = 1 << 24) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, nbytes))
        self._process.start()
        theirs.close()
        self.remote: RemoteArena = self._answer()

    def do(self, name: str, *arguments: Any) -> Any:
        self._pipe.send((name, arguments))
        return self._answer()

    def put(self, contents: bytes) -> EntryRef:
        entry: EntryRef = self.do("put", contents)
        return entry

    def stop(self) -> None:
        """Have it hang, in the middle of whatever it does."""
        pid = self._process.pid or 0
        os.kill(pid, signal.SIGSTOP)
        # Each of its threads stops when it next has a turn.
        while any(
            "State:\tT" not in (task / "status").read_text()
            for task in Path(f"/proc/{pid}/task").iterdir()
        ):
            time.sleep(0.001)

    def go_on(self) -> None:
        os.kill(self._process.pid or 0, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(PATIENCE)

    def __enter__(self) -> Owner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.is_alive():
            self.go_on()
        self._pipe.close()
        self._process.join(PATIENCE)
        if self._process.is_alive():
            self.kill()

    def _answer(self) -> Any:
        assert self._pipe.poll(PATIENCE), "the owner does not answer"
        return self._pipe.recv()
