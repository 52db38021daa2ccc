"""The side that is read from: an arena of this process, offered to others.

Readers announce when they begin and end (``messages.Pulling``), because the agent here
must be driven while they read, and must not be when nobody does.
"""

from __future__ import annotations

import threading
import time

from transfer.arena import Arena
from transfer.nixl.agent import NixlAgent
from transfer.tensor_ref import RemoteArena

PROGRESS_PAUSE = 0.0003
"""Seconds between two calls of ``progress``. Calling without a pause takes a core, and
was no faster."""


class ArenaExport:
    """Registers ``arena`` once, as a whole. Takes half a second.

    Raises:
        NixlUnavailable: NIXL does not work in this process.
    """

    def __init__(self, arena: Arena) -> None:
        memory = arena.memory()
        self._agent = NixlAgent(memory, "arena")
        self.remote = RemoteArena(
            arena=arena.id,
            agent=self._agent.name,
            metadata=self._agent.metadata,
            address=self._agent.address,
            nbytes=memory.nbytes,
        )
        self._changed = threading.Condition()
        self._until: dict[str, float] = {}
        """Who is reading, and how long that may take."""
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="NIXL progress", daemon=True)
        self._thread.start()

    def progress_for(self, reader: str, seconds: float) -> None:
        """Drive the agent for ``reader`` so long, or until told otherwise; 0 ends it."""
        with self._changed:
            if seconds > 0:
                self._until[reader] = time.monotonic() + seconds
            else:
                self._until.pop(reader, None)
            self._changed.notify()

    @property
    def busy(self) -> bool:
        """Whether somebody is reading."""
        with self._changed:
            return bool(self._until)

    def close(self) -> None:
        """Withdraw the offer: readers see the connection end."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        self._agent.close()

    def _run(self) -> None:
        while self._wait_for_readers():
            self._agent.progress()
            time.sleep(PROGRESS_PAUSE)

    def _wait_for_readers(self) -> bool:
        """Return when somebody reads; False when it is time to end."""
        with self._changed:
            now = time.monotonic()
            for reader in [name for name, until in self._until.items() if until < now]:
                del self._until[reader]
            while not self._until and not self._closed:
                self._changed.wait()
            return not self._closed
