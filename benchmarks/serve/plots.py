"""Plots of the comparison; needs matplotlib (``pip install 'foveal[bench]'``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import plotting
from benchmarks.serve.results import Figures, Rounds

COLOURS = {
    "foveal": "#0b7285", "vllm": "#9aa5b1", "vllm_rr": "#5f6c7b", "dynamo_py": "#d9822b",
    "dynamo_rust": "#8e6fc4",
}


def draw(rounds: Rounds, titles: Mapping[str, str], directory: Path) -> list[Path]:
    """Write ``serve-throughput.png`` and ``serve-ttft.png``; returns the paths.

    Raises:
        CannotMeasure: matplotlib is not installed.
    """
    plotting.prepare(directory)
    return [
        _bars(rounds, titles, "Requests per second (more is better)",
              lambda f: f.requests_per_second, directory / "serve-throughput.png"),
        _bars(rounds, titles, "First token, median, ms (less is better)",
              lambda f: 1000 * f.ttft_p50, directory / "serve-ttft.png"),
    ]


def _bars(
    rounds: Rounds,
    titles: Mapping[str, str],
    title: str,
    value: Callable[[Figures], float],
    path: Path,
) -> Path:
    workloads = list(dict.fromkeys(name for runs in rounds.values() for name in runs))
    figure, (axes,) = plotting.axes_in_a_row(1, (9.0, 4.0))
    width = 0.8 / max(1, len(rounds))
    for place, (system, runs) in enumerate(rounds.items()):
        at = [n + place * width for n, name in enumerate(workloads) if name in runs]
        values: list[list[float]] = [
            [value(f) for f in runs[name]] for name in workloads if name in runs
        ]
        heights = [median(each) for each in values]
        spread: Any = [
            [h - min(each) for h, each in zip(heights, values, strict=True)],
            [max(each) - h for h, each in zip(heights, values, strict=True)],
        ]
        axes.bar(at, heights, width * 0.95, yerr=spread, label=titles[system],
                 color=COLOURS[system], capsize=2)
    axes.set_xticks([n + 0.4 - width / 2 for n in range(len(workloads))], workloads)
    axes.set_title(title, loc="left")
    axes.legend(frameon=False, fontsize=8)
    return plotting.saved(figure, path)
