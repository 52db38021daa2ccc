from __future__ import annotations

from benchmarks.path.copies import PIXEL_BYTES, Count


def count(
    written: int = 0,
    sent: int = 0,
    grown: int = 0,
    own_pages: int = 0,
    elsewhere: bool = False,
) -> Count:
    return Count(written, {"frontend": sent}, {"runner": grown}, own_pages, elsewhere)


def test_one_write_into_the_arena_is_one_copy() -> None:
    assert count(written=PIXEL_BYTES, sent=900, grown=PIXEL_BYTES // 100).copies == 1.0


def test_every_trace_counts() -> None:
    everything = count(PIXEL_BYTES, PIXEL_BYTES, PIXEL_BYTES, PIXEL_BYTES, elsewhere=True)
    assert everything.copies == 5.0


def test_half_a_copy_is_not_overlooked() -> None:
    assert count(written=PIXEL_BYTES, own_pages=PIXEL_BYTES // 2).copies == 1.5
