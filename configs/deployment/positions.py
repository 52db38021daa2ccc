"""YAML with line numbers, so that a complaint about a key can say where the key stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

Path = tuple[str | int, ...]
"""Keys and places in lists, from the top: ``("workers", 0, "count")``."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: where (a line, 0 for none) and what, a sentence."""

    line: int
    text: str


class BadYaml(ValueError):
    """The text is not YAML with mappings of plain keys; carries the problem."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.text)
        self.problem = problem


@dataclass(frozen=True)
class Document:
    """The values of a file, and the line on which each of them stands."""

    values: dict[str, Any]
    lines: Mapping[Path, int]

    def line_of(self, path: Sequence[str | int]) -> int:
        """The line of ``path``, or of the nearest thing around it that the file has."""
        for length in range(len(path), 0, -1):
            if (line := self.lines.get(tuple(path[:length]))) is not None:
                return line
        return 1


def read_yaml(text: str) -> Document:
    """
    Raises:
        BadYaml: the text is not YAML, names a key twice, or is no mapping.
    """
    try:
        root = yaml.compose(text, yaml.SafeLoader)
        values = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise BadYaml(Problem(mark.line + 1 if mark else 1, str(error.problem))) from error
    except yaml.YAMLError as error:
        raise BadYaml(Problem(1, str(error).splitlines()[0])) from error
    if not isinstance(root, yaml.MappingNode):
        raise BadYaml(Problem(1, "a deployment is a mapping of keys to values"))
    lines: dict[Path, int] = {}
    _note_lines(root, (), lines)
    return Document(values, lines)


def _note_lines(node: yaml.Node, path: Path, lines: dict[Path, int]) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise BadYaml(Problem(line, "a key is a plain word"))
            inner = (*path, key.value)
            if inner in lines:
                raise BadYaml(
                    Problem(line, f"{dotted(inner)} stands on line {lines[inner]} already")
                )
            lines[inner] = line
            _note_lines(value, inner, lines)
    elif isinstance(node, yaml.SequenceNode):
        for place, value in enumerate(node.value):
            lines[(*path, place)] = value.start_mark.line + 1
            _note_lines(value, (*path, place), lines)


def dotted(path: Sequence[str | int]) -> str:
    """``("workers", 0, "count")`` -> ``workers.0.count``, as ``--set`` takes it."""
    return ".".join(str(part) for part in path)
