"""Compares the index with what a worker says it holds.

The two may be compared only when they speak of the same moment: the same start of the
worker and the same delta.
"""

from __future__ import annotations

from dataclasses import dataclass

from frontend.router.kv_index import KvIndex
from frontend.router.kv_plane import KvPlane
from transfer.messages import KvSnapshot


@dataclass(frozen=True, slots=True)
class KvDifference:
    """How the index and a snapshot differ, in blocks, added up over media."""

    held: int
    """Blocks that the worker holds."""
    missing: int
    """Of those, how many the index does not know."""
    phantom: int
    """Blocks that the index believes held, and the worker does not hold."""

    @property
    def equal(self) -> bool:
        return not (self.missing or self.phantom)


def compare(
    index: KvIndex, plane: KvPlane, worker: str, snapshot: KvSnapshot
) -> KvDifference | None:
    """Return the difference; None when the two are of different moments.

    Looks at every entry of the index.
    """
    at = (plane.epoch(worker), plane.seq(worker))
    if not plane.caught_up(worker) or at != (snapshot.epoch, snapshot.seq):
        return None
    held = missing = phantom = 0
    for medium in index.media() | snapshot.blocks.keys():
        said = set(snapshot.blocks.get(medium, ()))
        believed = index.resident(worker, medium)
        held += len(said)
        missing += len(said - believed)
        phantom += len(believed - said)
    return KvDifference(held, missing, phantom)
