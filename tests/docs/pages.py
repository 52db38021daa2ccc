"""What the documentation consists of, and what is said in it between fences."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LANGUAGES = {"sh", "python", "yaml", "json", "text", "mermaid"}
FENCE = re.compile(r"```(.*)")
# Options, arguments in brackets and shell operators end the words that name a command.
INLINE = re.compile(r"`((?:make|foveal|python3? -m) [^`]+)`")


@dataclass(frozen=True)
class Fence:
    """What stands between two fences, and where."""

    where: str
    language: str
    text: str


@dataclass(frozen=True)
class Command:
    """One command with its arguments, as the reader's shell would run it."""

    where: str
    arguments: tuple[str, ...]

    @property
    def text(self) -> str:
        return shlex.join(self.arguments)


def pages() -> list[Path]:
    """README, CONTRIBUTING and docs/."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]


def fences(page: Path) -> Iterator[Fence]:
    """
    Raises:
        ValueError: a fence is not closed.
    """
    opened: tuple[int, str] | None = None
    lines: list[str] = []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        fence = FENCE.fullmatch(line.strip())
        if fence is None:
            lines.append(line)
        elif opened is None:
            opened, lines = (number, fence[1]), []
        else:
            yield Fence(f"{shown(page)}:{opened[0]}", opened[1], "\n".join(lines))
            opened = None
    if opened is not None:
        raise ValueError(f"{shown(page)}:{opened[0]}: this fence is not closed")


def all_fences(language: str) -> list[Fence]:
    """Those of every page in one language."""
    return [f for page in pages() for f in fences(page) if f.language == language]


def prose(page: Path) -> str:
    """The page without what stands between fences; lines keep their numbers."""
    inside, lines = False, []
    for line in page.read_text().splitlines():
        is_fence = FENCE.fullmatch(line.strip()) is not None
        lines.append("" if inside or is_fence else line)
        inside ^= is_fence
    return "\n".join(lines)


def commands() -> list[Command]:
    """Every command between ``sh`` fences, in the order of the pages, without repetitions."""
    found: dict[tuple[str, ...], Command] = {}
    for fence in all_fences("sh"):
        for line in fence.text.replace("\\\n", " ").splitlines():
            for arguments in _split(line):
                found.setdefault(arguments, Command(fence.where, arguments))
    return list(found.values())


def inline_commands() -> list[Command]:
    """Commands that sentences and tables mention, in backquotes."""
    found: dict[tuple[str, ...], Command] = {}
    for page in pages():
        for number, line in enumerate(prose(page).splitlines(), 1):
            for text in INLINE.findall(line):
                for arguments in _split(text):
                    where = f"{shown(page)}:{number}"
                    found.setdefault(arguments, Command(where, arguments))
    return list(found.values())


def shown(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _split(line: str) -> Iterator[tuple[str, ...]]:
    arguments: list[str] = []
    for word in [*shlex.split(line, comments=True), "&&"]:
        if word != "&&":
            arguments.append(word)
        elif arguments:
            yield tuple(arguments)
            arguments = []
