"""Whether the flags that a file passes through exist, asked of those who define them.

Frontend and workers have a module that reads a command line and does no more. Theirs is
the word on vLLM's flags, of which nothing is repeated here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from configs.deployment.commands import (
    Command,
    frontend_command,
    on_node,
    worker_commands,
)
from configs.deployment.reading import DeploymentFile

FRONTEND_CHECK = [sys.executable, "-m", "frontend.check_flags"]
WORKER_CHECK = [sys.executable, "-m", "workers.check_flags"]
SECONDS = 120.0
"""How long it may take to import vLLM."""

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class _Question:
    program: list[str]
    command: Command
    options_at: KeyPath
    """Where in the file the options stand that are this command's alone."""


def check_flags(file: DeploymentFile) -> list[str]:
    """What frontend and workers say of their flags; empty when they take them all."""
    deployment = file.deployment
    registry = deployment.registry or Path("/tmp")
    questions = [
        _Question(
            FRONTEND_CHECK, frontend_command(deployment, registry), ("frontend", "options")
        )
    ]
    asked: set[int] = set()
    for command in worker_commands(deployment, registry):
        if command.group not in asked:
            asked.add(command.group)
            here: KeyPath = ("workers", command.group, "options")
            if deployment.launcher == "ray":
                command = on_node(command, "127.0.0.1")
            questions.append(_Question(WORKER_CHECK, command, here))
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        answers = pool.map(_ask, questions)
    return list(dict.fromkeys(
        file.complain(_blamed(file, question, text), text)
        for question, found in zip(questions, answers, strict=True)
        for text in found
    ))


def _ask(question: _Question) -> list[str]:
    try:
        done = subprocess.run(
            [*question.program, *question.command.arguments],
            env={**os.environ, **question.command.environment},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return [f"its flags could not be checked within {SECONDS:.0f} s"]
    return [] if done.returncode == 0 else list(_complaints(done.stderr or done.stdout))


def _complaints(said: str) -> Iterator[str]:
    last = next((line for line in reversed(said.splitlines()) if line.strip()), "no word")
    text = re.sub(r"^python -m [a-z.]+: (error: )?", "", last.strip())
    unknown = re.fullmatch(r"unrecognized arguments: (.*)", text)
    flags = re.findall(r"(?:^| )(--[A-Za-z0-9.-]+)", unknown[1]) if unknown else []
    if not flags:
        yield text
    for flag in flags:
        yield f"there is no flag {flag}"


def _blamed(file: DeploymentFile, question: _Question, text: str) -> KeyPath:
    """The key that brought the flag which the text names."""
    for flag in re.findall(r"--([A-Za-z0-9.-]+)", text):
        name = flag.rstrip(".").removeprefix("no-")
        for path in ((*question.options_at, name), ("engine", name), (name,)):
            if path in file.document.lines:
                return path
    return question.options_at
