"""Which encoder outputs an engine takes from its host, and how long it leases them.

The scheduler asks for one identifier at a time, often more than once, and may then not
schedule the request after all; so an output that is found is offered, and held for a
request once vLLM has made room for it. It is let go when vLLM frees the room or the
request ends, and some steps later, because the steps under way may still be loading it.

A request may come without the pixels of an image, because its worker process saw that the
host has the encoder's output. Such a request can be computed only while that is so, and
its outputs are held from the first time that it is looked at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from transfer.embeddings.store import EmbeddingLease, EmbeddingStore


@dataclass(frozen=True)
class EmbeddingLoad:
    """One output that the model runner is to load instead of running the encoder."""

    identifier: str
    path: str
    """Where the leased file can be opened on this host."""
    request_id: str
    index: int
    """Which of the request's items it is: to be encoded if it cannot be loaded."""


class EmbeddingLoads:
    """The leases of one scheduler."""

    def __init__(self, store: EmbeddingStore, steps_under_way: int) -> None:
        self._store = store
        self._steps_under_way = steps_under_way
        self._step = 0
        self._offered: dict[str, EmbeddingLease] = {}
        self._held: dict[str, dict[int, EmbeddingLease]] = {}
        """By request and item."""
        self._let_go: deque[tuple[int, EmbeddingLease]] = deque()
        """With the step until which they are kept."""
        self._loads: list[EmbeddingLoad] = []

    def offer(self, identifier: str) -> bool:
        """Tell whether an output can be loaded; leases it until the next step."""
        if identifier not in self._offered:
            lease = self._store.lease(identifier)
            if lease is None:
                return False
            self._offered[identifier] = lease
        return True

    def take(self, request_id: str, index: int, identifier: str) -> None:
        """Note that room was made for an item, to be loaded if it was offered."""
        lease = self._held.get(request_id, {}).get(index) or self._offered.get(identifier)
        if lease is None:
            return  # the encoder runs
        self._held.setdefault(request_id, {})[index] = lease
        self._loads.append(EmbeddingLoad(identifier, lease.path, request_id, index))

    def hold(self, request_id: str, items: Iterable[tuple[int, str]]) -> bool:
        """Hold the outputs of items that have no pixels; False if one is not there."""
        held = self._held.setdefault(request_id, {})
        for index, identifier in items:
            if index not in held:
                lease = self._store.lease_whole(identifier)
                if lease is None:
                    return False
                held[index] = lease
            self._offered.setdefault(identifier, held[index])
        return True

    def free(self, request_id: str, index: int) -> None:
        """Note that a request needs this output no more."""
        held = self._held.get(request_id, {})
        if index in held:
            self._retire(held.pop(index))
        if not held:
            self._held.pop(request_id, None)

    def finish(self, request_id: str) -> None:
        """Note that a request has ended."""
        for lease in self._held.pop(request_id, {}).values():
            self._retire(lease)

    def next_step(self) -> list[EmbeddingLoad]:
        """Return what the step that begins now is to load."""
        self._step += 1
        while self._let_go and self._let_go[0][0] < self._step:
            self._let_go.popleft()
        self._offered.clear()
        loads, self._loads = self._loads, []
        return loads

    def __len__(self) -> int:
        """Count the outputs leased for requests."""
        return sum(len(held) for held in self._held.values())

    def _retire(self, lease: EmbeddingLease) -> None:
        self._let_go.append((self._step + self._steps_under_way, lease))
