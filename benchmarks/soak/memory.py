"""How much memory the processes of a fleet hold, over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

from configs.deployment.children import Child

MIB = 1 << 20


@dataclass
class Samples:
    """The resident memory of one process, in bytes, at even intervals."""

    name: str
    values: list[int] = field(default_factory=list)

    def quarter(self, number: int) -> float:
        """The mean of the first to fourth quarter of the run, in bytes."""
        size = max(1, len(self.values) // 4)
        begin = size * (number - 1)
        part = self.values[begin:] if number == 4 else self.values[begin : begin + size]
        return mean(part or self.values[-1:])

    @property
    def growth(self) -> float:
        """From the third quarter to the last, as a share. Before that caches fill."""
        return self.quarter(4) / self.quarter(3) - 1


def sample(children: Sequence[Child], into: dict[int, Samples]) -> None:
    """Add the resident memory of every process that these started, shared pages too."""
    sessions = {child.pid: child.name for child in children}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            stat = (entry / "stat").read_text()
            statm = (entry / "statm").read_text()
        except OSError:  # it has ended meanwhile
            continue
        session = int(stat[stat.rindex(")") + 2 :].split()[3])
        if session not in sessions:
            continue
        pid = int(entry.name)
        title = stat[stat.index("(") + 1 : stat.rindex(")")]
        known = into.setdefault(pid, Samples(f"{sessions[session]} ({title}, {pid})"))
        known.values.append(int(statm.split()[1]) * 4096)


def table(samples: Sequence[Samples]) -> str:
    """For people: the mean of each quarter, and how much is still being added."""
    lines = [f"  {'MiB resident, by quarter of the run':44}{'1':>8}{'2':>8}{'3':>8}{'4':>8}"]
    for each in samples:
        quarters = "".join(f"{each.quarter(n) / MIB:8.0f}" for n in (1, 2, 3, 4))
        lines.append(f"  {each.name:44}{quarters}   {each.growth:+.1%} in the last half")
    return "\n".join(lines)
