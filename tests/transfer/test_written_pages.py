from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from transfer.written_pages import WrittenPages

PAGE = mmap.PAGESIZE
PAGES = 64


@pytest.fixture
def mapping(tmp_path: Path) -> Iterator[mmap.mmap]:
    path = tmp_path / "file"
    path.write_bytes(b"\1" * PAGES * PAGE)
    with path.open("r+b") as file:
        mapping = mmap.mmap(
            file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
    yield mapping
    mapping.close()


@pytest.fixture
def written(mapping: mmap.mmap) -> Iterator[WrittenPages]:
    written = WrittenPages(mapping)
    yield written
    written.close()


def test_pages_that_were_never_touched_are_not_written(written: WrittenPages) -> None:
    assert not written.may_be_in(0, PAGES)


def test_reading_is_not_writing(mapping: mmap.mmap, written: WrittenPages) -> None:
    assert mapping[:] == b"\1" * PAGES * PAGE
    assert not written.may_be_in(0, PAGES)


@pytest.mark.parametrize("page", [0, 1, 17, PAGES - 1])
def test_one_written_page_is_found_where_it_is(
    mapping: mmap.mmap, written: WrittenPages, page: int
) -> None:
    mapping[:]
    mapping[page * PAGE + 5] = 2
    assert written.may_be_in(page, page + 1)
    assert written.may_be_in(0, PAGES)
    assert not written.may_be_in(0, page)
    assert not written.may_be_in(page + 1, PAGES)


def test_a_page_that_was_dropped_is_not_written(
    mapping: mmap.mmap, written: WrittenPages
) -> None:
    mapping[0] = 2
    mapping.madvise(mmap.MADV_DONTNEED, 0, PAGE)
    assert not written.may_be_in(0, PAGES)
    assert mapping[0] == 1


@pytest.mark.parametrize("text", [None, b"", b"short"])
def test_where_the_kernel_does_not_tell_any_page_may_be_written(
    mapping: mmap.mmap, tmp_path: Path, text: bytes | None
) -> None:
    pagemap = tmp_path / "pagemap"
    if text is not None:
        pagemap.write_bytes(text)
    written = WrittenPages(mapping, pagemap)
    assert written.may_be_in(0, 1)
    written.close()


def test_once_closed_it_holds_no_descriptor(mapping: mmap.mmap) -> None:
    before = os.listdir("/proc/self/fd")
    written = WrittenPages(mapping)
    written.close()
    written.close()
    assert os.listdir("/proc/self/fd") == before
    assert written.may_be_in(0, 1)
