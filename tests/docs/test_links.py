"""Every link within the documentation leads somewhere."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, pages, prose, shown

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.*?) *#*$", re.MULTILINE)


@cache
def anchors(page: Path) -> frozenset[str]:
    """Of its headings, made as GitHub makes them."""
    found: list[str] = []
    for heading in HEADING.findall(prose(page)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        again = sum(other.rstrip("-0123456789") == anchor for other in found)
        found.append(f"{anchor}-{again}" if anchor in found else anchor)
    return frozenset(found)


def test_anchors_are_githubs() -> None:
    page = ROOT / "docs" / "deployment.md"
    assert {"what-foveal-up-does", "on-several-hosts-etcd", "sizing"} <= anchors(page)


@pytest.mark.parametrize("page", pages(), ids=shown)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(prose(page)):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{shown(page)}: {link} leads nowhere"
        assert target.is_relative_to(ROOT), f"{shown(page)}: {link} leaves the repository"
        if anchor:
            assert anchor in anchors(target), f"{shown(page)}: {link} has no such heading"


def test_every_page_can_be_found() -> None:
    """From the README, by links."""
    found, new = set(), {ROOT / "README.md"}
    while new:
        found |= new
        new = {
            target
            for page in new
            for link in LINK.findall(prose(page))
            if (target := (page.parent / link.partition("#")[0]).resolve()).suffix == ".md"
            and target.exists()
        } - found
    assert {shown(page) for page in pages()} <= {shown(page) for page in found}
