"""Whatever is done to an arena, in any order: it does what a naive model does, and no
reader, in this process or another, ever gets bytes that are not the reference's."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.transfer.arena_model import (
    ArenaModel,
    ModelEntry,
    contents_of,
    identity_of,
    pages_for,
)
from tests.transfer.arena_readers import OtherProcess, Readers, Task
from transfer.arena import Arena
from transfer.arena_layout import ENTRY_HEADER_BYTES, PAGE_BYTES
from transfer.errors import ArenaFull, StaleRef
from transfer.leases import Lease, Reservation
from transfer.tensor_ref import EntryRef

PAGES = 8
LABELS = st.integers(0, 1)
# Around the ends of pages, where headers and payloads of neighbours meet.
SIZES = st.builds(
    lambda pages, more: max(0, pages * PAGE_BYTES - ENTRY_HEADER_BYTES + more),
    st.sampled_from([1, 1, 1, 2, 2, 3, 5, PAGES]),
    st.sampled_from([-PAGE_BYTES, -100, -1, 0, 1]),
)
PICK = st.integers(0, 1000)


@dataclass
class Reader:
    """A reader, and what it has written over the entries it read, by generation."""

    process: Readers | OtherProcess
    scribbled: dict[int, bytes] = field(default_factory=dict)


class ArenaAgainstModel(RuleBasedStateMachine):
    """Puts, leases, releases and evicts at random."""

    other_process: OtherProcess

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory(prefix="foveal-test-")
        self.arena = Arena(PAGES * PAGE_BYTES, Path(self.directory.name))
        self.model = ArenaModel(PAGES)
        self.here = Readers()
        self.readers = [Reader(self.here), Reader(self.other_process)]
        self.open: list[tuple[Reservation, str, int]] = []
        self.leases: list[tuple[Lease, ModelEntry]] = []
        self.refs: dict[int, EntryRef] = {}
        """Every reference there has ever been, by generation."""

    def teardown(self) -> None:
        self.here.close()
        self.arena.close()
        self.directory.cleanup()

    @rule(nbytes=SIZES)
    def reserve(self, nbytes: int) -> None:
        place = self.model.reserve(nbytes)
        if place is None:
            with pytest.raises(ArenaFull):
                self.arena.reserve(nbytes)
        else:
            reservation = self.arena.reserve(nbytes)
            assert reservation.memory.nbytes == nbytes
            self.open.append((reservation, place, nbytes))

    @precondition(lambda self: self.open)
    @rule(pick=PICK, label=LABELS, keeps=st.booleans())
    def seal(self, pick: int, label: int, keeps: bool) -> None:
        reservation, place, nbytes = self.open.pop(pick % len(self.open))
        reservation.memory[:] = contents_of(label, nbytes)
        identity = identity_of(label, nbytes)
        lease = reservation.seal(identity)
        self.note(lease, self.model.seal(place, identity, nbytes))
        if not keeps:
            self.release(len(self.leases) - 1, releases=False)

    @precondition(lambda self: self.open)
    @rule(pick=PICK, cancels=st.booleans())
    def give_up(self, pick: int, cancels: bool) -> None:
        reservation, place, _ = self.open.pop(pick % len(self.open))
        # What was half written must never be seen.
        reservation.memory[:] = b"?" * reservation.memory.nbytes
        if cancels:
            reservation.cancel()
        del reservation
        self.model.give_back(place)

    @precondition(lambda self: self.refs)
    @rule(pick=PICK)
    def lease(self, pick: int) -> None:
        identity = list(self.refs.values())[pick % len(self.refs)].identity
        lease, entry = self.arena.lease(identity), self.model.entries.get(identity)
        assert (lease is None) == (entry is None)
        if lease is not None and entry is not None:
            self.note(lease, self.model.lease(entry))

    @precondition(lambda self: self.leases)
    @rule(pick=PICK, releases=st.booleans())
    def release(self, pick: int, releases: bool) -> None:
        lease, entry = self.leases.pop(pick % len(self.leases))
        if releases:
            lease.release()
        del lease
        self.model.release(entry)

    @rule()
    def drop_unleased(self) -> None:
        self.arena.drop_unleased()
        for entry in list(self.model.idle):
            self.model.drop(entry)

    @precondition(lambda self: self.model.entries)
    @rule(pick=PICK, which=st.integers(0, 1), scribble=st.sampled_from([b"", b"#!"]))
    def read(self, pick: int, which: int, scribble: bytes) -> None:
        entries = list(self.model.entries.values())
        ref = self.refs[entries[pick % len(entries)].generation]
        reader = self.readers[which]
        answer = reader.process.carry_out(self.task(ref, scribble))
        assert answer.still_good
        written = contents_of(ref.identity[0], ref.nbytes)
        assert answer.contents == reader.scribbled.get(ref.generation, written)
        if scribble:
            reader.scribbled[ref.generation] = (scribble * ref.nbytes)[: ref.nbytes]

    @precondition(lambda self: self.gone())
    @rule(pick=PICK, which=st.integers(0, 1))
    def read_what_is_gone(self, pick: int, which: int) -> None:
        gone = self.gone()
        task = self.task(gone[pick % len(gone)])
        assert self.readers[which].process.carry_out(task).contents is None

    @invariant()
    def counters_are_the_model_s(self) -> None:
        stats, model = self.arena.stats(), self.model
        assert stats.entries == len(model.entries)
        assert stats.leased_entries == len(model.entries) - len(model.idle)
        assert stats.bytes_used == (PAGES - model.space.count(".")) * PAGE_BYTES
        assert stats.evictions == model.evictions
        assert stats.bytes_written == model.bytes_written
        assert stats.full == model.full

    @invariant()
    def what_is_leased_is_in_its_place(self) -> None:
        for lease, entry in self.leases:
            ref = lease.entry
            assert (ref.generation, ref.offset) == (
                entry.generation,
                self.model.offset_of(entry),
            )
            assert bytes(self.arena.view(ref)) == contents_of(ref.identity[0], ref.nbytes)

    def note(self, lease: Lease, entry: ModelEntry) -> None:
        assert lease.entry.identity == entry.identity
        assert lease.entry.generation == entry.generation
        self.leases.append((lease, entry))
        self.refs[entry.generation] = lease.entry

    def task(self, ref: EntryRef, scribble: bytes = b"") -> Task:
        return Task(self.arena.id, self.directory.name, ref, scribble)

    def gone(self) -> list[EntryRef]:
        good = {entry.generation for entry in self.model.entries.values()}
        return [ref for generation, ref in self.refs.items() if generation not in good]


@pytest.fixture(scope="module")
def other_process() -> Iterator[OtherProcess]:
    process = OtherProcess()
    yield process
    process.close()


def test_any_sequence_of_steps_does_what_the_model_does(other_process: OtherProcess) -> None:
    machine = type("Machine", (ArenaAgainstModel,), {"other_process": other_process})
    machine.TestCase.settings = settings(
        max_examples=60,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    machine.TestCase().runTest()


def test_a_reader_that_races_with_the_owner_never_takes_wrong_bytes(
    other_process: OtherProcess, tmp_path: Path
) -> None:
    """It looks at the reference before and after it copies the bytes; meanwhile the owner
    puts others in their place as fast as it can."""
    sizes = (100, PAGE_BYTES, 3 * PAGE_BYTES)
    expected: deque[bytes] = deque()
    with Arena(PAGES * PAGE_BYTES, tmp_path) as arena:

        def put(number: int) -> EntryRef:
            label, nbytes = number % 251, sizes[number % len(sizes)]
            reservation = arena.reserve(nbytes)
            reservation.memory[:] = contents_of(label, nbytes)
            return reservation.seal(identity_of(label, nbytes)).entry

        def begin(number: int) -> None:
            label, nbytes = number % 251, sizes[number % len(sizes)]
            expected.append(contents_of(label, nbytes))
            # No lease is kept: it may be replaced before it is read.
            other_process.begin(Task(arena.id, str(tmp_path), put(number)))

        def end() -> bool:
            answer, contents = other_process.result(), expected.popleft()
            assert not answer.still_good or answer.contents == contents
            return answer.still_good

        for number in range(500):
            begin(number)
            # Far enough ahead that entries are replaced before, while and after they are
            # read, and not so far that the pipes fill up.
            if len(expected) > 6:
                end()
        while len(expected) > 1:
            end()
        assert end()  # the last one was replaced by nothing


def test_a_reader_that_comes_too_late_is_told_so(
    other_process: OtherProcess, tmp_path: Path
) -> None:
    with Arena(PAGES * PAGE_BYTES, tmp_path) as arena:
        reservation = arena.reserve(100)
        reservation.memory[:] = contents_of(1, 100)
        lease = reservation.seal(identity_of(1, 100))
        task = Task(arena.id, str(tmp_path), lease.entry)
        assert other_process.carry_out(task).contents == contents_of(1, 100)
        lease.release()
        arena.drop_unleased()
        assert other_process.carry_out(task).contents is None


@pytest.mark.parametrize("pages", [1, 2, 5])
def test_space_in_pieces_is_one_again_when_all_of_it_is_free(
    tmp_path: Path, pages: int
) -> None:
    with Arena(PAGES * PAGE_BYTES, tmp_path) as arena:
        nbytes = pages * PAGE_BYTES - ENTRY_HEADER_BYTES
        assert pages_for(nbytes) == pages
        held = [arena.reserve(nbytes) for _ in range(PAGES // pages)]
        for reservation in (*held[::2], *held[1::2]):
            reservation.cancel()
        whole = arena.reserve(PAGES * PAGE_BYTES - ENTRY_HEADER_BYTES)
        assert whole.memory.nbytes == PAGES * PAGE_BYTES - ENTRY_HEADER_BYTES


def test_a_reference_of_one_arena_is_stale_in_another(tmp_path: Path) -> None:
    with Arena(PAGE_BYTES, tmp_path) as one, Arena(PAGE_BYTES, tmp_path) as other:
        leases = []
        for arena in (one, other):
            reservation = arena.reserve(16)
            reservation.memory[:] = contents_of(1, 16)
            leases.append(reservation.seal(identity_of(1, 16)))
        with pytest.raises(StaleRef):
            other.view(leases[0].entry)
