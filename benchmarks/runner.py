"""What every benchmark does around its measuring: its sections one after the other, and all
metrics at the end, those that could not be measured included."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType

from benchmarks import machine
from benchmarks.metrics import CannotMeasure, Metric, unmeasured


@dataclass(frozen=True)
class Section:
    """One part of a benchmark."""

    name: str
    promised: Sequence[tuple[str, str, str | None]]
    """Name, unit and goal of each metric that ``measure`` gives, when all goes well."""
    measure: Callable[[], Iterable[Metric]]


def parser_of(benchmark: str, text: str | None) -> argparse.ArgumentParser:
    """For the flags of ``python -m benchmarks.BENCHMARK``; ``text`` is its docstring."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{benchmark}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def chosen_sections(benchmark: str, text: str | None, names: Sequence[str]) -> list[str]:
    """The sections that the command line names, or else all, in the order of ``names``."""
    parser = parser_of(benchmark, text)
    parser.add_argument("section", nargs="*", help=f"any of: {', '.join(names)}")
    given = parser.parse_args().section
    if unknown := set(given) - set(names):
        parser.error(f"no such section: {', '.join(sorted(unknown))}")
    return [name for name in names if name in given or not given]


def prepare_for_vllm(quiet: bool = True) -> None:
    """Set what vLLM reads when it is imported, here and in the processes started from here."""
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"
    # Standard output is for the figures.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    if quiet:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def run(sections: Sequence[Section]) -> int:
    """Measure, and print a line of JSON for each metric; returns the exit status.

    A section that fails does not cost the others, and what it has measured before counts.
    The status is 1 if one has failed, 0 also where this machine could not measure something,
    and 130 after Ctrl-C or SIGTERM, when nothing is printed.
    """
    metrics: list[Metric] = []
    failed = False
    began = time.monotonic()
    try:
        with ended_by_sigterm():
            for section in sections:
                elapsed = time.monotonic() - began
                print(f"\n{section.name} ({elapsed:.0f} s; {machine.describe()})", flush=True)
                measured: list[Metric] = []
                try:
                    for metric in section.measure():
                        measured.append(metric)
                except CannotMeasure as why:
                    measured += _left(section, measured, str(why))
                except Exception as error:
                    traceback.print_exc()
                    measured += _left(section, measured, f"{type(error).__name__}: {error}")
                    failed = True
                metrics += measured
    except KeyboardInterrupt:
        return 130
    print(f"\nMeasured in {time.monotonic() - began:.0f} s.")
    for metric in metrics:
        print(metric.line())
    return 1 if failed else 0


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Within, SIGTERM and SIGHUP unwind like Ctrl-C, so that everything is stopped."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {
        number: signal.signal(number, interrupt)
        for number in (signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _left(section: Section, measured: Sequence[Metric], why: str) -> list[Metric]:
    names = {metric.name for metric in measured}
    return unmeasured([each for each in section.promised if each[0] not in names], why)
