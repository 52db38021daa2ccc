"""The commands and the Python of the documentation that need a running fleet."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.docs.pages import all_fences, commands
from tests.docs.rules import program_of, rule_for

DOCUMENTED_URL = "http://127.0.0.1:8000"


@dataclass(frozen=True)
class Line:
    """What to run for something on a page."""

    where: str
    arguments: list[str]


def lines(url: str, foveal: Sequence[str], python: str) -> Iterator[Line]:
    """In the order of the pages. ``foveal`` takes the place of that program.

    ``url`` is where the fleet is; a command that names no address gets it as its last word
    unless it is where the documentation has its fleet.
    """
    for command in commands():
        rule = rule_for(command)
        if rule is None or rule.way != "fleet":
            continue
        program, *rest = program_of(command)
        words = [
            word.strip("[]").replace("URL", url).replace(DOCUMENTED_URL, url) for word in rest
        ]
        if program == "foveal" and words == ["status"] and url != DOCUMENTED_URL:
            words.append(url)
        yield Line(
            command.where, [*(foveal if program == "foveal" else [program]), *words]
        )
        if program == "curl":  # a picture is shown twice for what the second answer says
            yield Line(command.where, [program, *words])
    for fence in all_fences("python"):
        yield Line(fence.where, [python, "-c", fence.text.replace(DOCUMENTED_URL, url)])


def run(line: Line, directory: Path, environment: dict[str, str]) -> str:
    """What it printed on standard output.

    Raises:
        AssertionError: it failed, or an answer was no success.
    """
    done = subprocess.run(
        line.arguments, cwd=directory, env={**os.environ, **environment},
        capture_output=True, text=True, timeout=300,
    )
    said = f"{line.where}: {line.arguments}\n{done.stdout}{done.stderr}"
    assert done.returncode == 0, said
    if line.arguments[0] == "curl":
        assert done.stdout.startswith("HTTP/1.1 200 "), said
    return done.stdout
