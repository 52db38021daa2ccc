"""The ``foveal`` command: up, check, status, bench.

Starts everything else by its command line, and imports none of it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from configs.bench.command import add_bench_flags, run_bench
from configs.deployment.flag_check import check_flags
from configs.deployment.fleet import NoFleet, fetch_fleet, fleet_table
from configs.deployment.reading import BadDeployment, DeploymentFile, read_deployment
from configs.deployment.up import PARTS, UpFailed, run_up

LOCAL_URL = "http://127.0.0.1:8000"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status: 0, 1 for a failure, 2 for bad input."""
    given = parser().parse_args(arguments)
    try:
        if given.command == "up":
            return _up(given)
        if given.command == "check":
            return _check(given)
        if given.command == "status":
            return _status(given)
        return run_bench(given, Console())
    except BadDeployment as error:
        for problem in error.problems:
            print(problem, file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever reads has seen enough
        sys.stderr.close()
        return 1
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="foveal", description="Serves a vision-language model on several vLLM workers."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="start what a file describes, until Ctrl-C")
    check = commands.add_parser("check", help="check such a file; starts nothing")
    for each in (up, check):
        each.add_argument("file", type=Path, help="YAML file, see docs/deployment.md")
        each.add_argument(
            "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
            help="change a value of the file, as in --set workers.0.count=4; repeatable",
        )
    up.add_argument("--host", help="address to serve on (--set http.host=)")
    up.add_argument("--port", type=int, help="port to serve on (--set http.port=)")
    up.add_argument(
        "--only", choices=PARTS, help="start these only: the others run on other hosts"
    )
    status = commands.add_parser("status", help="show the workers of a running frontend")
    status.add_argument("url", nargs="?", default=LOCAL_URL, help=f"default {LOCAL_URL}")
    status.add_argument("--api-key", default="", help="key of the API, if it asks for one")
    status.add_argument("--json", action="store_true", help="as JSON")
    add_bench_flags(commands.add_parser("bench", help="run a load on a server, and time it"))
    return parser


def _up(given: argparse.Namespace) -> int:
    overrides = list(given.overrides)
    overrides += [f"http.host={json.dumps(given.host)}"] if given.host is not None else []
    overrides += [f"http.port={given.port}"] if given.port is not None else []
    file = read_deployment(given.file, overrides)
    try:
        run_up(file, (given.only,) if given.only else PARTS)
    except UpFailed as failure:
        print(f"foveal up: {failure}", file=sys.stderr)
        return 1
    return 0


def _check(given: argparse.Namespace) -> int:
    file: DeploymentFile = read_deployment(given.file, given.overrides)
    problems = check_flags(file)
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        return 2
    deployment = file.deployment
    print(
        f"{given.file} is right: {deployment.model} on {deployment.worker_count} workers "
        f"({deployment.launcher}), {deployment.frontend.count} frontend processes at "
        f"{deployment.http.host}:{deployment.http.port}"
    )
    return 0


def _status(given: argparse.Namespace) -> int:
    try:
        fleet = fetch_fleet(given.url, given.api_key)
    except NoFleet as error:
        print(f"foveal status: {error}", file=sys.stderr)
        return 1
    if given.json:
        print(json.dumps(fleet, indent=1))
    else:
        Console().print(fleet_table(fleet))
    return 0 if any(worker["ready"] for worker in fleet["workers"]) else 1
