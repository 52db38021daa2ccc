"""Flags, variables, metrics, headers and files that the documentation names exist."""

from __future__ import annotations

import argparse
import re
from functools import cache
from pathlib import Path

import pytest

from configs import cli
from configs.flags import flag_of
from configs.schema import FrontendConfig, WorkerConfig
from tests.docs.checks import exists
from tests.docs.pages import ROOT, pages, shown

FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*(?:\.\.\.)?")
VARIABLE = re.compile(r"\b(?:FOVEAL|DYN|DYNAMO)_[A-Z_]+\b")
METRIC = re.compile(r"\bfoveal_[a-z_]+\b(?![.-])")
FILE = re.compile(
    r"`((?:benchmarks|configs|docs|frontend|tests|transfer|workers|\.ci)/[\w./*-]*)(?:::\w+)?`"
)
FOREIGN_FLAGS = {
    "--head",  # ray start
    "--ipc", "--shm-size",  # docker run
    "--strict",  # mypy
}
BEFORE = re.compile(r"^\| [^|]*\||^# before\n(?:.+\n)+", re.MULTILINE)
"""In the page about Dynamo: the first cells of its tables and the lines that are replaced."""


def text_of(page: Path) -> str:
    text = page.read_text()
    return BEFORE.sub("|", text) if page.name == "migration-from-dynamo.md" else text


@cache
def flags() -> frozenset[str]:
    """Of frontend and workers, vLLM's included; of the commands and benchmarks."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    ours = {*FrontendConfig.model_fields, *WorkerConfig.model_fields}
    found = {flag_of(name) for name in ours}
    serve, engine = FlexibleArgumentParser(), FlexibleArgumentParser()
    make_arg_parser(serve)
    AsyncEngineArgs.add_cli_args(engine)
    parsers: list[argparse.ArgumentParser] = [serve, engine]
    for parser in (cli.parser(), *parsers):
        for action in parser._actions:
            found |= set(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                for inner in action.choices.values():
                    found |= {flag for each in inner._actions for flag in each.option_strings}
    for source in (ROOT / "benchmarks").rglob("__main__.py"):
        found |= set(re.findall(r'add_argument\(\s*"(--[a-z-]+)"', source.read_text()))
    return frozenset(found | FOREIGN_FLAGS)


@pytest.mark.parametrize("page", pages(), ids=shown)
def test_flags_exist(page: Path) -> None:
    for flag in set(FLAG.findall(text_of(page))) - {"--no-"}:
        if flag.endswith("..."):
            assert any(known.startswith(flag[:-3]) for known in flags()), flag
        else:
            assert flag in flags(), f"{shown(page)} names {flag}, which does not exist"


@pytest.mark.parametrize("page", pages(), ids=shown)
def test_variables_exist(page: Path) -> None:
    known = {
        extra["env"]
        for settings in (FrontendConfig, WorkerConfig)
        for field in settings.model_fields.values()
        if isinstance(extra := field.json_schema_extra, dict) and "env" in extra
    }
    assert set(VARIABLE.findall(text_of(page))) <= known


@pytest.mark.parametrize("page", pages(), ids=shown)
def test_metrics_exist(page: Path) -> None:
    # That page is compared with a running frontend by a test of its own.
    known = set(METRIC.findall((ROOT / "docs" / "metrics.md").read_text()))
    for metric in METRIC.findall(page.read_text()):
        if metric.endswith("_"):  # foveal_url_cache_*
            assert any(name.startswith(metric) for name in known), metric
        else:
            assert metric in known, f"{shown(page)} names {metric}, which does not exist"


@pytest.mark.parametrize("page", pages(), ids=shown)
def test_headers_exist(page: Path) -> None:
    sources = (ROOT / "frontend" / "receipt.py").read_text()
    for header in set(re.findall(r"\bx-foveal-[a-z-]*[a-z]\b", page.read_text())):
        assert header in sources, f"{shown(page)} names {header}, which does not exist"


@pytest.mark.parametrize("page", pages(), ids=shown)
def test_files_exist(page: Path) -> None:
    for path in FILE.findall(page.read_text()):
        assert exists(path), f"{shown(page)} names {path}, which does not exist"
