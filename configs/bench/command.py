"""``foveal bench URL``: a load on a running server, ours or any other with its API."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from configs.bench.figures import figures_of, figures_table
from configs.bench.load import Answer, NoServer, first_model, send_load
from configs.bench.workload import Workload
from configs.deployment.fleet import with_scheme


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of ``foveal bench``."""
    defaults = Workload(model="")
    parser.add_argument("url", help="address of the server, http://host:port")
    parser.add_argument("--model", help="name of the model (default: the server's first)")
    parser.add_argument("--api-key", default="", help="key of the API, if it asks for one")
    parser.add_argument(
        "--concurrency", type=_at_least(1), default=8, help="requests under way at once (8)"
    )
    for name, least, text in (
        ("requests", 1, "requests in all"),
        ("pictures", 0, "pictures in each; 0: text only"),
        ("pool", 0, "different pictures there are; 0: none is shown twice"),
        ("width", 1, "of a picture, in pixels"),
        ("height", 1, "of a picture, in pixels"),
        ("words", 0, "words of text in each"),
        ("max-tokens", 1, "tokens of each answer"),
        ("seed", 0, "the same seed asks the same"),
    ):
        default = getattr(defaults, name.replace("-", "_"))
        parser.add_argument(
            f"--{name}", type=_at_least(least), default=default, help=f"{text} ({default})"
        )
    parser.add_argument(
        "--timeout", type=float, default=300.0, help="seconds for one answer (300)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")


def run_bench(arguments: argparse.Namespace, console: Console) -> int:
    """Run the load; the exit status is 1 where nothing, or not everything, was answered."""
    url = with_scheme(arguments.url).rstrip("/")
    try:
        model = arguments.model or asyncio.run(first_model(url, arguments.api_key))
    except NoServer as error:
        print(f"foveal bench: {error}", file=sys.stderr)
        return 1
    workload = Workload(
        model=model,
        **{
            name: getattr(arguments, name)
            for name in (
                "requests", "pictures", "pool", "width", "height", "words", "max_tokens",
                "seed",
            )
        },
    )
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("drawing pictures", total=workload.requests)
        bodies = []
        for body in workload.bodies():
            bodies.append(body)
            progress.advance(task)
        progress.reset(task, description=f"asking {model}")

        def note(answer: Answer) -> None:
            progress.advance(task)

        answers, seconds = asyncio.run(
            send_load(
                url, bodies, arguments.concurrency, arguments.timeout, arguments.api_key, note
            )
        )
    figures = figures_of(answers, seconds)
    console.print(figures_table(figures))
    for text, count in figures["error_texts"].items():
        console.print(f"{count} x {text}", markup=False)
    if figures["prompt_tokens"] and not figures["cached_tokens"]:
        console.print(
            "No cached tokens: does the server run with --enable-prompt-tokens-details?"
        )
    if arguments.json is not None:
        _write(arguments.json, {"url": url, "workload": workload.__dict__, **figures})
    return 1 if figures["errors"] or not answers else 0


def _write(path: Path, figures: dict[str, Any]) -> None:
    path.write_text(json.dumps(figures, indent=1) + "\n")


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"a whole number is needed, at least {least}")
        return int(text)

    return number
