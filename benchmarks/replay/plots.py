"""Pictures of the results; needs matplotlib (``pip install 'foveal[bench]'``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks import plotting
from benchmarks.replay.results import Figures

COLOURS = {
    "kv": "#0b6e4f",
    "oracle": "#999999",
    "least-loaded": "#c8553d",
    "round-robin": "#5b8e7d",
    "random": "#f2b134",
}


def draw(traces: Mapping[str, Mapping[str, Figures]], directory: Path) -> list[Path]:
    """Write ``replay-*.png`` into ``directory`` and return the paths.

    Raises:
        CannotMeasure: matplotlib is not installed.
    """
    plotting.prepare(directory)
    return [
        _hit_ratios(traces, directory / "replay-hit-ratio.png"),
        _ttft_percentiles(traces, directory / "replay-ttft.png"),
        _ttft_distributions(traces, directory / "replay-ttft-distribution.png"),
        _spread(traces, directory / "replay-spread.png"),
    ]


def _hit_ratios(traces: Mapping[str, Mapping[str, Figures]], path: Path) -> Path:
    values = {
        trace: {policy: f.hit_ratio for policy, f in figures.items()}
        for trace, figures in traces.items()
    }
    return _bars(values, "Prompt tokens taken from caches", "share", path)


def _spread(traces: Mapping[str, Mapping[str, Figures]], path: Path) -> Path:
    values = {
        trace: {policy: f.busy_spread for policy, f in figures.items()}
        for trace, figures in traces.items()
    }
    return _bars(values, "Busiest worker over the mean", "ratio of seconds computed", path)


def _bars(
    values: Mapping[str, Mapping[str, float]], title: str, unit: str, path: Path
) -> Path:
    figure, axes = plotting.axes_in_a_row(1, (9.0, 3.6))
    policies = list(next(iter(values.values())))
    width = 0.8 / len(policies)
    for place, policy in enumerate(policies):
        positions = [n + (place - len(policies) / 2 + 0.5) * width for n in range(len(values))]
        heights = [by_policy[policy] for by_policy in values.values()]
        axes[0].bar(positions, heights, width, label=policy, color=COLOURS.get(policy))
    axes[0].set_xticks(range(len(values)), list(values))
    axes[0].set_title(title)
    axes[0].set_ylabel(unit)
    axes[0].legend(ncols=len(policies), fontsize="small", loc="lower right", framealpha=0.9)
    return plotting.saved(figure, path)


def _ttft_percentiles(traces: Mapping[str, Mapping[str, Figures]], path: Path) -> Path:
    figure, axes = plotting.axes_in_a_row(len(traces), (2.6 * len(traces), 3.6))
    for place, (trace, figures) in enumerate(traces.items()):
        for policy, f in figures.items():
            names = [f"p{percent}" for percent in f.ttft]
            heights = [seconds * 1e3 for seconds in f.ttft.values()]
            axes[place].plot(
                names, heights, marker="o", label=policy, color=COLOURS.get(policy)
            )
        axes[place].set_yscale("log")
        axes[place].set_title(trace)
    axes[0].set_ylabel("time to first token, ms")
    axes[0].legend(fontsize="small")
    return plotting.saved(figure, path)


def _ttft_distributions(traces: Mapping[str, Mapping[str, Figures]], path: Path) -> Path:
    figure, axes = plotting.axes_in_a_row(len(traces), (2.6 * len(traces), 3.6))
    for place, (trace, figures) in enumerate(traces.items()):
        for policy, f in figures.items():
            shares = [(n + 1) / len(f.ttfts) for n in range(len(f.ttfts))]
            axes[place].plot(
                [seconds * 1e3 for seconds in f.ttfts], shares,
                label=policy, color=COLOURS.get(policy),
            )
        axes[place].set_xscale("log")
        axes[place].set_title(trace)
        axes[place].set_xlabel("ms to first token")
    axes[0].set_ylabel("share of requests")
    axes[0].legend(fontsize="small")
    return plotting.saved(figure, path)
