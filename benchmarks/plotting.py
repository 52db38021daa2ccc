"""What plots have in common; needs matplotlib (``pip install 'foveal[bench]'``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.metrics import CannotMeasure


def prepare(directory: Path) -> None:
    """Make ``directory``, and have plots drawn into files.

    Raises:
        CannotMeasure: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise CannotMeasure(
            "plots need matplotlib: install the extra `bench` of this project"
        ) from None
    matplotlib.use("agg")
    directory.mkdir(parents=True, exist_ok=True)


def axes_in_a_row(count: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """A figure of ``size`` inches, and ``count`` axes in it."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, count, figsize=size, squeeze=False)
    for each in axes[0]:
        each.grid(alpha=0.3)
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes[0]


def saved(figure: Any, path: Path) -> Path:
    """Write the figure and let go of it."""
    from matplotlib import pyplot

    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
