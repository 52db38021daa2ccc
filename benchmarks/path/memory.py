"""What the kernel says of the memory of a process, seen from outside."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ (\d+)\s*(.*)")
_KB = re.compile(r"(\w+):\s+(\d+) kB")


@dataclass(frozen=True)
class Residence:
    """Resident memory of a process, in bytes."""

    total: int
    peak: int
    """The highest ``total`` since ``forget_peak``."""
    shared: int
    """Files and shared memory that it has touched."""


def residence(pid: int) -> Residence:
    sizes = parse_sizes(Path(f"/proc/{pid}/status").read_text())
    return Residence(
        total=sizes["VmRSS"],
        peak=sizes["VmHWM"],
        shared=sizes["RssFile"] + sizes["RssShmem"],
    )


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def private_growth(before: Residence, after: Residence) -> int:
    """Bytes of its own that a process had more of at some moment in between.

    What it touched of shared memory meanwhile is not its own.
    """
    touched = max(0, after.shared - before.shared)
    return max(0, after.peak - before.total - touched)


@dataclass(frozen=True)
class Mapping:
    """One mapping of a process."""

    start: int
    end: int
    inode: int
    path: str
    own_pages: int
    """Bytes in pages that it has copied by writing. ``Private_Dirty`` would not do: it has
    every dirty page that nobody else happens to have mapped."""

    def holds(self, address: int, nbytes: int) -> bool:
        return self.start <= address and address + nbytes <= self.end


def mapping_of(pid: int, inode: int) -> Mapping | None:
    """The mapping of the file with this inode, if the process has it mapped."""
    for mapping in parse_mappings(Path(f"/proc/{pid}/smaps").read_text()):
        if mapping.inode == inode:
            return mapping
    return None


def parse_mappings(smaps: str) -> list[Mapping]:
    """Read the text of ``/proc/PID/smaps``."""
    mappings = []
    for block in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", smaps):
        head = _MAPPING.match(block)
        if head is None:
            continue
        start, end, inode, path = head.groups()
        own_pages = parse_sizes(block).get("Anonymous", 0)
        mappings.append(Mapping(int(start, 16), int(end, 16), int(inode), path, own_pages))
    return mappings


def parse_sizes(text: str) -> dict[str, int]:
    """Read lines like ``VmRSS:  123 kB``; bytes by name."""
    return {name: int(kb) * 1024 for name, kb in _KB.findall(text)}
