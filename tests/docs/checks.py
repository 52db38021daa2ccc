"""Looks at a command without running it: are there such flags, files and targets?

Flags are read by the parsers of the programs themselves.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from unittest.mock import patch

from configs.deployment.reading import read_deployment
from tests.docs.pages import ROOT

PLACEHOLDERS = {"FILE": "configs/demo-cpu.yaml", "N": "2", "M": "model", "NAME": "photos"}
"""What stands for something that the reader has to put there."""
MADE_BY_MAKE = re.compile(r"(?:exec )?\.venv/bin/(python -m \S+.*|foveal .*)")
NOT_OURS = ("python -m pip", "python -m pytest")
READ_FLAGS = ("configs", "frontend", "workers")
"""Besides benchmarks and what makes keys: these read their flags before they do anything."""
WITHOUT_FLAGS = ("configs.reference", "tests.docs.newcomer", "tests.families.report")


class BadCommand(Exception):
    """There is no such flag, file or target; the text says which."""


class _Parsed(BaseException):
    """Flags were read, and all of them exist."""


def check(arguments: Sequence[str]) -> None:
    """
    Raises:
        BadCommand: it could not be run as it stands.
    """
    program, *rest = (PLACEHOLDERS.get(word, word) for word in map(_given, arguments))
    if program == "make":
        _check_make(rest)
    elif program == "foveal":
        _check_module("configs", rest)
    elif program == "pip":
        _check_extras(rest)
    elif rest[:2] == ["-m", "venv"]:
        pass
    elif program in ("python", "python3") and rest[:1] == ["-m"]:
        _check_module(rest[1], rest[2:])
    else:
        raise BadCommand(f"nobody knows how to check {program}")


def check_mention(arguments: Sequence[str]) -> None:
    """As ``check``, of what a sentence calls by its name, perhaps without what it needs.

    Raises:
        BadCommand: there is no such command, or no such flag.
    """
    bare = 2 if arguments[0] == "foveal" else 3
    named_only = arguments[0] != "make" and len(arguments) == bare
    module = arguments[2] if named_only and bare == 3 else ""
    if named_only and module not in WITHOUT_FLAGS:
        arguments = [*arguments, "--help"]
    check(arguments)


def _given(word: str) -> str:
    """``[URL]`` may be left out, but is given here."""
    return word[1:-1] if word.startswith("[") and word.endswith("]") else word


def _check_make(rest: Sequence[str]) -> None:
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", "--no-print-directory", *rest],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )
    if done.returncode:
        raise BadCommand(done.stderr.strip())
    for line in done.stdout.splitlines():
        made = MADE_BY_MAKE.fullmatch(line)
        # `--always-make` shows the installation, too, which no argument can spoil.
        if made is not None and not made[1].startswith(NOT_OURS):
            check(shlex.split(made[1].partition(">")[0]))


def _check_module(module: str, flags: Sequence[str]) -> None:
    if not (ROOT / module.replace(".", "/")).with_suffix(".py").exists() and not (
        ROOT / module.replace(".", "/") / "__main__.py"
    ).exists():
        raise BadCommand(f"there is no module {module}")
    if module in WITHOUT_FLAGS:
        if flags:
            raise BadCommand(f"{module} takes no flags")
        return
    if not module.startswith(("benchmarks.", "transfer.")) and module not in READ_FLAGS:
        raise BadCommand(f"nobody knows whether {module} begins by reading its flags")
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            given = PARSERS.get(module, partial(_run_until_parsed, module))(flags)
        if module == "configs" and given.command in ("up", "check"):
            read_deployment(ROOT / given.file)
    except SystemExit as end:
        if end.code in (0, None):  # --help
            return
        raise BadCommand(f"{module}: {said.getvalue().strip() or end}") from end
    except ValueError as error:
        raise BadCommand(f"{module}: {error}") from error


def _frontend(flags: Sequence[str]) -> argparse.Namespace:
    from frontend.command_line import parse

    return parse(flags)[1]


def _workers(flags: Sequence[str]) -> argparse.Namespace:
    from workers.engine_args import parse

    return parse(flags)[1]


PARSERS: dict[str, Callable[[Sequence[str]], argparse.Namespace]] = {
    "frontend": _frontend, "workers": _workers
}
"""Of programs that do something before they read their flags."""


def _run_until_parsed(module: str, flags: Sequence[str]) -> argparse.Namespace:
    read = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: argparse.ArgumentParser, *args: object, **kwargs: object) -> None:
        raise _Parsed(read(self, *args, **kwargs))  # type: ignore[call-overload]

    with (
        patch.object(sys, "argv", [module, *flags]),
        patch.object(argparse.ArgumentParser, "parse_args", parse_and_stop),
        warnings.catch_warnings(),
    ):
        # Another test may have imported the module, which runpy warns of.
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            runpy.run_module(module, run_name="__main__")
        except _Parsed as parsed:
            given: argparse.Namespace = parsed.args[0]
            return given
    raise BadCommand(f"{module} does not read its flags")


def _check_extras(rest: Sequence[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in _extras(rest):
        if extra not in project["optional-dependencies"]:
            raise BadCommand(f"the package has no extra {extra}")


def _extras(words: Sequence[str]) -> Iterator[str]:
    for word in words:
        if found := re.search(r"\[(.+)\]$", word):
            yield from found[1].split(",")


def exists(path: str) -> bool:
    """Whether the repository has it; ``*`` stands for anything."""
    return any(ROOT.glob(path)) if "*" in path else Path(ROOT, path).exists()
