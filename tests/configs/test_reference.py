"""docs/flags.md is what the settings say."""

from __future__ import annotations

from pathlib import Path

from configs.reference import reference

PAGE = Path(__file__).parents[2] / "docs" / "flags.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == reference(), "run `make docs-flags`"
