"""What is done with each command of the documentation: run, or why it is only checked.

A command without a rule fails the tests, and so does a rule without a command.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tests.docs.pages import Command

Way = Literal["run", "fleet", "checked", "foreign"]


@dataclass(frozen=True)
class Rule:
    """For commands that begin with ``words``; of several rules the longest holds.

    ``run``: run as it is, without a fleet (test_commands.py). ``fleet``: run before a fleet
    (tests/e2e/test_docs_commands.py). ``checked``: not run, for the reason ``why``; its flags,
    files and targets are looked at (checks.py). ``foreign``: another project's.
    """

    words: str
    way: Way
    why: str = ""


SERVES = "it serves until it is ended; tests/e2e starts such processes"
LONG = "it measures for minutes"

RULES = (
    Rule("make serve", "checked", "it installs 6 GB first; `make newcomer` runs it"),
    Rule("make test", "checked", "these tests are part of it"),
    Rule("make unit", "checked", "these tests are part of it"),
    Rule("make check", "checked", "`make test` begins with it"),
    Rule("make newcomer", "checked", "it installs 6 GB into a clone"),
    Rule("make bench-replay", "checked", LONG),
    Rule("make bench-serve", "checked", LONG),
    Rule("python3.11 -m venv", "checked", "an environment for GPUs has no use here"),
    Rule("pip install", "checked", "it installs gigabytes for GPUs"),
    Rule("foveal check", "run"),
    Rule("foveal up", "checked", SERVES),
    Rule("foveal status", "fleet"),
    Rule("foveal bench", "fleet"),
    Rule("foveal bench URL", "checked", "the quickstart's is run"),
    Rule("curl", "fleet"),
    Rule("python -m transfer.make_keys", "run"),
    Rule("python -m workers", "checked", SERVES),
    Rule("python -m frontend", "checked", SERVES),
    Rule("python -m benchmarks.replay", "run"),
    Rule("python -m benchmarks.replay --workers", "checked", LONG),
    Rule("python -m benchmarks.replay --plots", "checked", LONG),
    Rule("python -m dynamo.frontend", "foreign", "NVIDIA Dynamo's"),
    Rule("python -m dynamo.vllm", "foreign", "NVIDIA Dynamo's"),
)


def program_of(command: Command) -> tuple[str, ...]:
    """The command's arguments with its program by its plain name."""
    first, *rest = command.arguments
    return (first.removeprefix(".venv/bin/").removeprefix(".venv-gpu/bin/"), *rest)


def rule_for(command: Command) -> Rule | None:
    """The rule with the most words that the command begins with."""
    arguments = program_of(command)
    fitting = [
        rule for rule in RULES
        if arguments[: len(words := tuple(rule.words.split()))] == words
    ]
    return max(fitting, key=lambda rule: len(rule.words.split()), default=None)
