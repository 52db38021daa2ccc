"""Any sequence of saves, loads, leases and losses, by several users, against a model."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from transfer.embeddings.entry import HEADER_BYTES
from transfer.embeddings.store import EmbeddingLease, EmbeddingStore

USERS = 3
CAPACITY = 8192
users = st.integers(0, USERS - 1)
numbers = st.integers(0, 7)


def named(number: int) -> str:
    return f"image-{number:032x}"


def output(number: int) -> torch.Tensor:
    return torch.full((number * 40 + 8,), float(number))


def size(number: int) -> int:
    return HEADER_BYTES + output(number).nbytes


class SharedStore(RuleBasedStateMachine):
    """The model is a list of what is held, the longest unused first."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="fv-"))
        self.stores = [
            EmbeddingStore(self.directory, "key", CAPACITY) for _ in range(USERS)
        ]
        self.held: list[int] = []
        self.leases: list[tuple[int, EmbeddingLease]] = []
        self.orphans: list[tuple[int, EmbeddingLease]] = []
        """Leases of what was cleared since: it takes no room that is counted."""

    def teardown(self) -> None:
        self.leases.clear()
        self.orphans.clear()
        for store in self.stores:
            store.close()
        shutil.rmtree(self.directory)

    @rule(user=users, number=numbers)
    def save(self, user: int, number: int) -> None:
        expected = number not in self.held and self.make_room(size(number))
        assert self.stores[user].save(named(number), output(number)) == expected
        if expected:
            self.held.append(number)

    @rule(user=users, number=numbers)
    def load(self, user: int, number: int) -> None:
        loaded = self.stores[user].load(named(number))
        assert (loaded is not None) == (number in self.held)
        if loaded is not None:
            assert torch.equal(loaded, output(number))
            self.use(number)

    @rule(user=users, number=numbers)
    def lease(self, user: int, number: int) -> None:
        lease = self.stores[user].lease(named(number))
        assert (lease is not None) == (number in self.held)
        if lease is not None:
            self.use(number)
            self.leases.append((number, lease))

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 100))
    def release(self, which: int) -> None:
        number, lease = self.leases.pop(which % len(self.leases))
        assert torch.equal(lease.load(), output(number))
        lease.release()

    @precondition(lambda self: self.orphans)
    @rule()
    def release_what_was_cleared(self) -> None:
        number, lease = self.orphans.pop()
        assert torch.equal(lease.load(), output(number))
        lease.release()

    @rule(user=users, number=numbers)
    def spoil(self, user: int, number: int) -> None:
        if number in self.held and number not in {leased for leased, _ in self.leases}:
            path = self.directory / named(number)
            path.write_bytes(path.read_bytes()[:-1] + b"\xff")
            assert self.stores[user].load(named(number)) is None
            self.held.remove(number)

    @rule(user=users)
    def restart(self, user: int) -> None:
        self.stores[user].close()
        self.stores[user] = EmbeddingStore(self.directory, "key", CAPACITY)

    @rule(user=users)
    def clear(self, user: int) -> None:
        self.stores[user].clear()
        self.held.clear()
        self.orphans += self.leases
        self.leases.clear()

    @invariant()
    def all_agree(self) -> None:
        for store in self.stores:
            assert store.identifiers() == [named(number) for number in self.held]
        assert sum(size(number) for number in self.held) <= CAPACITY

    def use(self, number: int) -> None:
        self.held.remove(number)
        self.held.append(number)

    def make_room(self, wanted: int) -> bool:
        leased = {number for number, _ in self.leases}
        for number in list(self.held):
            if sum(map(size, self.held)) + wanted <= CAPACITY:
                break
            if number not in leased:
                self.held.remove(number)
        return sum(map(size, self.held)) + wanted <= CAPACITY


TestSharedStore = SharedStore.TestCase
TestSharedStore.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
