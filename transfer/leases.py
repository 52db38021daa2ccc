"""Who still needs which part of an arena.

Leases and reservations end when they are no longer referenced, so that whatever fails
between making one and using it needs no bookkeeping. The garbage collector may end them
in any thread at any moment, even within the arena's own lock: all that happens then is
an append to a deque that the arena drains later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from transfer.arena_layout import IDENTITY_LENGTHS
from transfer.tensor_ref import EntryRef


class Lease:
    """Pins one entry: while any lease of it lives, the entry cannot be evicted.

    It ends when it is released or when it is no longer referenced, whichever is first.
    """

    __slots__ = ("__weakref__", "_held", "_released", "entry")

    def __init__(self, entry: EntryRef, released: deque[int]) -> None:
        self.entry = entry
        self._released = released
        # Emptied by one step of the interpreter, so that only one thread ends the lease.
        self._held = [entry.generation]

    def release(self) -> None:
        """End the lease now. Doing it again does nothing."""
        with suppress(IndexError):
            self._released.append(self._held.pop())

    def __del__(self) -> None:
        if self._held:  # nobody else has a hold of it now
            self._released.append(self._held.pop())

    def __reduce__(self) -> NoReturn:
        # Covers copy, deepcopy and pickle: a copy would end the lease a second time.
        raise TypeError("a lease cannot be copied: take another from the arena")


class Reservation:
    """Space for one entry, to be written and then sealed.

    ``memory`` has exactly the bytes that were asked for, ``offset`` says where in the
    arena's file they are; keep the reservation as long as anybody writes to them. One that
    is dropped without being sealed gives its space back.
    """

    __slots__ = ("__weakref__", "_abandon", "_publish", "memory", "offset")

    def __init__(
        self,
        memory: memoryview,
        offset: int,
        publish: Callable[[bytes], Lease],
        abandon: Callable[[], object],
    ) -> None:
        self.memory = memory
        self.offset = offset
        self._publish = publish
        # Emptied by one step of the interpreter: it is sealed or given back only once.
        self._abandon = [abandon]

    def seal(self, identity: bytes) -> Lease:
        """Publish the entry and lease it. ``memory`` must not be written any more.

        If another reservation of the same identity was sealed first, that entry is
        leased and this one's space is given back.

        Raises:
            ValueError: no identity has that many bytes.
            RuntimeError: sealed or cancelled before.
            ArenaGone: the arena was closed.
        """
        if len(identity) not in IDENTITY_LENGTHS:
            raise ValueError(f"an identity has 16 to 32 bytes, not {len(identity)}")
        try:
            self._abandon.pop()
        except IndexError:
            raise RuntimeError("this reservation was sealed or cancelled before") from None
        self._release_memory()
        return self._publish(identity)

    def cancel(self) -> None:
        """Give the space back. Does nothing after ``seal`` or another ``cancel``."""
        self._release_memory()
        with suppress(IndexError):
            self._abandon.pop()()

    def __del__(self) -> None:
        if self._abandon:
            self._abandon.pop()()

    def _release_memory(self) -> None:
        # Refused while someone has a view of it, who is then trusted not to write.
        with suppress(BufferError):
            self.memory.release()
