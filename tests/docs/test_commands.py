"""A newcomer's pass over every command between fences, as far as it needs no fleet.

Those that need one are run by tests/e2e/test_docs_commands.py, and `make newcomer` runs all
of them in a fresh clone.
"""

from __future__ import annotations

import ast
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from configs.deployment.reading import read_deployment
from tests.docs.checks import BadCommand, check, check_mention
from tests.docs.pages import (
    LANGUAGES,
    ROOT,
    Command,
    Fence,
    all_fences,
    commands,
    fences,
    inline_commands,
    pages,
    shown,
)
from tests.docs.rules import RULES, program_of, rule_for

COMMANDS = commands()
YAML = all_fences("yaml")
RUN = [command for command in COMMANDS if getattr(rule_for(command), "way", "") == "run"]


def name_of(item: Command | Fence) -> str:
    return f"{item.where} {item.text.splitlines()[0]}"


def is_ours(command: Command) -> bool:
    rule = rule_for(command)
    return rule is None or rule.way != "foreign"


@pytest.mark.parametrize("page", pages(), ids=shown)
def test_every_fence_says_what_is_in_it(page: Path) -> None:
    for fence in fences(page):
        assert fence.language in LANGUAGES, f"{fence.where}: write one of {LANGUAGES}"


def test_every_command_is_run_or_it_is_said_why_not() -> None:
    assert len(COMMANDS) > 20
    for command in COMMANDS:
        assert rule_for(command), f"{command.where}: `{command.text}` has no rule"
    for rule in RULES:
        assert (rule.way in ("checked", "foreign")) == bool(rule.why), rule


def test_every_rule_has_a_command() -> None:
    assert set(RULES) == {rule_for(command) for command in COMMANDS}


@pytest.mark.parametrize("command", list(filter(is_ours, COMMANDS)), ids=name_of)
def test_flags_files_and_targets_exist(command: Command) -> None:
    if program_of(command)[0] != "curl":
        check(program_of(command))


@pytest.mark.parametrize("command", inline_commands(), ids=name_of)
def test_what_a_sentence_mentions_exists(command: Command) -> None:
    if is_ours(command):
        check_mention(command.arguments)


@pytest.mark.parametrize(
    "wrong",
    [
        "make no-such-target", 'make bench-serve ARGS="--sise 2"', "foveal chekc FILE",
        "foveal check configs/none.yaml", "foveal up FILE --prot 1", "pip install '.[gpus]'",
        "python -m frontend --no-such", "python -m workers --model m --mm-arena-gb 1",
        "python -m transfer.no_such_module", "python -m benchmarks.replay --werkers 2",
        "rm -rf configs",
    ],
)
def test_a_mistake_would_be_noticed(wrong: str) -> None:
    with pytest.raises(BadCommand):
        check(shlex.split(wrong))


@pytest.mark.parametrize("fence", YAML, ids=lambda fence: fence.where)
def test_examples_of_deployments_are_right(fence: Fence, tmp_path: Path) -> None:
    path = tmp_path / "example.yaml"
    # What an example leaves out is the one key that must be there.
    missing = "" if "model" in yaml.safe_load(fence.text) else "model: m\n"
    path.write_text(missing + fence.text)
    read_deployment(path)


@pytest.mark.parametrize("fence", all_fences("python"), ids=lambda fence: fence.where)
def test_python_compiles(fence: Fence) -> None:
    ast.parse(fence.text, fence.where)


@pytest.fixture
def reader(tmp_path: Path) -> Path:
    """A directory with what the pages assume: the shipped files, and their examples."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "FILE").write_text(YAML[0].text)
    # The page wraps what is one line in a trace.
    (example,) = all_fences("json")
    decoder, text, lines = json.JSONDecoder(), example.text.strip(), []
    while text:
        request, end = decoder.raw_decode(text)
        lines.append(json.dumps(request))
        text = text[end:].strip()
    (tmp_path / "day.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.mark.parametrize("command", RUN, ids=name_of)
def test_it_runs(command: Command, reader: Path) -> None:
    program, *rest = program_of(command)
    rest = [word.replace("/etc/foveal", str(reader)) for word in rest]
    line = ["-m", "configs", *rest] if program == "foveal" else rest
    done = subprocess.run(
        [sys.executable, *line], cwd=reader, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
