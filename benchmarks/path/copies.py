"""How often are the pixels copied between the processor and the model runner? Counted.

Wherever bytes can go they leave a trace, and all traces are added up, in units of the
pixels of one 64 MiB picture:

- bytes written into the arena, by its own counter;
- bytes of each message between two processes: both sockets and the engine's queue;
- private memory that a process gained on the way, at its peak, by the kernel's account:
  a copy on the heap, a receive buffer;
- pages of the arena that the runner has as copies of its own, by the kernel's account;
- one more, if the runner's tensor does not lie in the mapping of the arena's file.

The same count for plain vLLM, through the same processes, shows that it counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.metrics import Metric
from benchmarks.path.chain import MIB, Chain, Passage, make_item
from benchmarks.path.memory import (
    Residence,
    forget_peak,
    mapping_of,
    private_growth,
    residence,
)
from transfer.arena_layout import SHM

NAME, UNIT, GOAL = "pixel_copies", "copies", "==1"
PLAIN_NAME = "pixel_copies_plain_vllm"
PIXEL_BYTES = 64 * MIB
ROUNDS = 3
SENDERS = ("frontend", "worker", "engine")


@dataclass(frozen=True)
class Count:
    """Bytes by where they went."""

    written: int
    messages: dict[str, int]
    grown: dict[str, int]
    own_pages: int
    elsewhere: bool

    @property
    def copies(self) -> float:
        """All of it, in pictures, to a tenth: a process also grows by other things."""
        nbytes = self.written + self.own_pages
        nbytes += sum(self.messages.values()) + sum(self.grown.values())
        return round(nbytes / PIXEL_BYTES + self.elsewhere, 1)

    def describe(self) -> str:
        parts = [f"arena {_in_pictures(self.written)}"]
        parts += [f"sent by {role} {_in_pictures(n)}" for role, n in self.messages.items()]
        parts += [f"grown in {role} {_in_pictures(n)}" for role, n in self.grown.items()]
        parts += [f"runner's own pages {_in_pictures(self.own_pages)}"]
        parts += ["tensor not in the arena 1"] if self.elsewhere else []
        return ", ".join(parts)


async def measure(chain: Chain) -> list[Metric]:
    plain, foveal = [], []
    for turn in range(-1, ROUNDS):  # the first one warms up
        routed = await _count(chain, "foveal", 2 * turn)
        direct = await _count(chain, "plain", 2 * turn + 1)
        if turn >= 0:
            foveal.append(routed)
            plain.append(direct)
    for title, counted in (("Foveal", foveal), ("plain vLLM", plain)):
        typical = sorted(counted, key=lambda count: count.copies)[len(counted) // 2]
        print(f"  {title}: {typical.copies} copies; {typical.describe()}", flush=True)
    return [
        Metric(NAME, median(count.copies for count in foveal), UNIT, GOAL),
        Metric(PLAIN_NAME, median(count.copies for count in plain), UNIT),
    ]


async def _count(chain: Chain, way: str, number: int) -> Count:
    item = make_item(PIXEL_BYTES, number)
    growth = Growth(chain.pids())
    written = chain.arena.stats().bytes_written
    passage = await (chain.pass_foveal if way == "foveal" else chain.pass_plain)(item)
    # Before the runner reads: what it then touches of the arena would hide what it copied.
    growth.add()
    await chain.read_all(passage)
    growth.add()
    own_pages, elsewhere = _look_at_arena(chain, passage) if way == "foveal" else (0, False)
    return Count(
        written=chain.arena.stats().bytes_written - written,
        messages={role: n for role, n in passage.counts.items() if role in SENDERS},
        grown=growth.nbytes,
        own_pages=own_pages,
        elsewhere=elsewhere,
    )


class Growth:
    """Adds up by how much processes grow, from one look at them to the next."""

    def __init__(self, pids: dict[str, int]) -> None:
        self.nbytes = dict.fromkeys(pids, 0)
        self._pids = pids
        self._before = self._look()

    def add(self) -> None:
        for role, pid in self._pids.items():
            self.nbytes[role] += private_growth(self._before[role], residence(pid))
        self._before = self._look()

    def _look(self) -> dict[str, Residence]:
        for pid in self._pids.values():
            forget_peak(pid)
        return {role: residence(pid) for role, pid in self._pids.items()}


def _look_at_arena(chain: Chain, passage: Passage) -> tuple[int, bool]:
    """The runner's own pages in its mapping, and whether its tensor lies elsewhere."""
    inode = Path(SHM, chain.arena.id.name).stat().st_ino
    mapping = mapping_of(chain.pids()["runner"], inode)
    if mapping is None:
        return 0, True
    inside = mapping.holds(passage.counts["address"], passage.counts["nbytes"])
    return mapping.own_pages, not inside


def _in_pictures(nbytes: int) -> str:
    return f"{nbytes / PIXEL_BYTES:.3f}"
