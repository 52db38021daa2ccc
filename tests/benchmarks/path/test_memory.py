from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from benchmarks.path.memory import (
    Residence,
    forget_peak,
    mapping_of,
    parse_mappings,
    private_growth,
    residence,
)

MIB = 1 << 20
SMAPS = """\
7f00-7f10 rw-p 00001000 00:1a 42                         /dev/shm/foveal-1 (deleted)
Size:                  8 kB
Anonymous:             4 kB
VmFlags: rd wr mr
8f00-8f10 rw-p 00000000 00:00 0
Anonymous:           100 kB
"""


def test_mappings_are_read_with_their_own_pages() -> None:
    first, second = parse_mappings(SMAPS)
    assert (first.start, first.end, first.inode) == (0x7F00, 0x7F10, 42)
    assert first.path == "/dev/shm/foveal-1 (deleted)"
    assert first.own_pages == 4096
    assert (second.inode, second.own_pages) == (0, 102400)


@pytest.mark.parametrize(
    ("address", "nbytes", "held"),
    [(0x7F00, 0x10, True), (0x7F00, 0x11, False), (0x7EFF, 1, False), (0x7F0F, 1, True)],
)
def test_a_mapping_holds_what_lies_wholly_within(
    address: int, nbytes: int, held: bool
) -> None:
    assert parse_mappings(SMAPS)[0].holds(address, nbytes) is held


def test_a_copy_that_is_gone_again_has_been_seen() -> None:
    before = Residence(total=100, peak=100, shared=40)
    after = Residence(total=100, peak=164, shared=40)
    assert private_growth(before, after) == 64


def test_shared_memory_that_is_touched_is_no_growth() -> None:
    before = Residence(total=100, peak=100, shared=40)
    after = Residence(total=164, peak=164, shared=104)
    assert private_growth(before, after) == 0


def test_the_kernel_tells_of_a_copy_on_the_heap() -> None:
    pid = os.getpid()
    forget_peak(pid)
    before = residence(pid)
    copy = bytearray(b"x") * (32 * MIB)
    del copy
    growth = private_growth(before, residence(pid))
    assert 31 * MIB < growth < 40 * MIB


def test_the_kernel_tells_a_page_of_ones_own_from_a_shared_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(64 * 4096))
    with path.open("r+b") as file:
        private = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)
        private.read()
        inode = path.stat().st_ino
        mapping = mapping_of(os.getpid(), inode)
        assert mapping is not None
        assert mapping.own_pages == 0
        private[0] = 1
        mapping = mapping_of(os.getpid(), inode)
        assert mapping is not None
        assert mapping.own_pages == 4096
        private.close()
    assert mapping_of(os.getpid(), inode) is None
