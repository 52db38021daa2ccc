"""The table of docs/models.md, from what the matrix test found.

    python -m tests.families.report

takes what ``make matrix`` has noted and writes it between the marks in docs/models.md.
Families that were not run keep their lines.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.families.matrix import Cell
from tests.families.questions import MIXED, SEEDS, TEXT
from tests.families.table import FAMILIES, Family

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / ".demo" / "families" / "found.json"
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- matrix: begin -->", "<!-- matrix: end -->"

COLUMNS = (TEXT, "image", "video", "audio", MIXED)

Found = dict[str, dict[str, dict[str, Any]]]
"""By family, and by column and transfer, as in "image, shm"."""


def note(results: Path, cell: Cell) -> None:
    """Add what was found to a file of results."""
    found = read(results)
    found.setdefault(cell.family, {})[f"{cell.column}, {cell.transfer}"] = cell.as_record()
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(json.dumps(found, indent=1, sort_keys=True))


def read(results: Path) -> Found:
    found: Found = json.loads(results.read_text()) if results.exists() else {}
    return found


def line(family: Family, found: dict[str, dict[str, Any]]) -> str:
    """The table's line about one family."""
    if family.no_engine:
        empty = " |" * len(COLUMNS)
        return f"| {family.title} | {family.kind} |{empty} not on CPU: {family.no_engine} |"
    cells = [_cell(family, column, found) for column in COLUMNS]
    reuse = _reuse(found)
    return f"| {family.title} | {family.kind} | {' | '.join(cells)} | {reuse} |"


def _cell(family: Family, column: str, found: dict[str, dict[str, Any]]) -> str:
    told = [found.get(f"{column}, {transfer}") for transfer in SEEDS]
    if all(one is None for one in told):
        return ""
    marks = [
        transfer if one and one["exact"] and one["overlap"] and one["by_reference"]
        else f"**not {transfer}**"
        for transfer, one in zip(SEEDS, told, strict=True)
    ]
    return ", ".join(marks)


def _reuse(found: dict[str, dict[str, Any]]) -> str:
    cached = sum(one["cached_tokens"] for one in found.values())
    reusable = sum(one["reusable_tokens"] for one in found.values())
    return f"{cached} of {reusable}"


def table(found: Found) -> str:
    head = f"| family | language model | {' | '.join(COLUMNS)} | reused of repeated prompts |"
    rule = "|" + "---|" * (len(COLUMNS) + 3)
    lines = [
        line(family, found.get(name, {}))
        for name, family in FAMILIES.items()
        if name in found or family.no_engine
    ]
    return "\n".join([head, rule, *lines])


def write(page: Path, found: Found) -> None:
    """Put the table between the marks of a page.

    Raises:
        ValueError: it has no marks.
    """
    text = page.read_text()
    pattern = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"{page} has no place for the table")
    inside = f"{BEGIN}\n{table(found)}\n{END}"
    page.write_text(pattern.sub(lambda _: inside, text))


if __name__ == "__main__":
    write(PAGE, read(RESULTS))
