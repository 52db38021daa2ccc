"""From answers to figures, and from figures to a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from rich.table import Table

from configs.bench.load import Answer

PERCENTILES = (50, 90, 99)


def figures_of(answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """All figures of one run; those that nothing was measured of are None.

    ``ttft_ms`` and ``inter_token_ms`` (between pieces of text of one answer) have the
    percentiles 50, 90 and 99.
    """
    good = [answer for answer in answers if not answer.error]
    gaps = [b - a for answer in good for a, b in pairwise(answer.tokens_at)]
    prompt = sum(answer.prompt_tokens for answer in good)
    cached = sum(answer.cached_tokens for answer in good)
    output = sum(answer.completion_tokens for answer in good)
    errors = Counter(answer.error for answer in answers if answer.error)
    return {
        "requests": len(answers),
        "errors": len(answers) - len(good),
        "error_texts": dict(errors.most_common(5)),
        "seconds": seconds,
        "requests_per_second": len(good) / seconds if seconds else None,
        "output_tokens_per_second": output / seconds if seconds else None,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "cached_share": cached / prompt if prompt else None,
        "output_tokens": output,
        "ttft_ms": _percentiles([answer.first_token for answer in good]),
        "inter_token_ms": _percentiles(gaps),
        "latency_ms": _percentiles([answer.end for answer in good]),
        "workers": dict(Counter(a.worker for a in good if a.worker)),
        "transfers": dict(Counter(a.transfer for a in good if a.transfer)),
    }


def figures_table(figures: dict[str, Any]) -> Table:
    """``figures`` for people."""
    table = Table(show_header=True, title=None)
    table.add_column("")
    for percent in PERCENTILES:
        table.add_column(f"p{percent}", justify="right")
    for name, key in (
        ("time to first token, ms", "ttft_ms"),
        ("between tokens, ms", "inter_token_ms"),
        ("whole answer, ms", "latency_ms"),
    ):
        values = figures[key] or {}
        table.add_row(name, *(_number(values.get(f"p{percent}")) for percent in PERCENTILES))
    table.add_section()
    share = figures["cached_share"]
    cached = f"{figures['cached_tokens']} of {figures['prompt_tokens']} prompt tokens"
    for name, text in (
        ("requests per second", _number(figures["requests_per_second"], 2)),
        ("output tokens per second", _number(figures["output_tokens_per_second"])),
        ("cached", cached + (f" ({share:.0%})" if share is not None else "")),
        ("by worker", _counts(figures["workers"])),
        ("by transfer", _counts(figures["transfers"])),
        ("errors", f"{figures['errors']} of {figures['requests']}"),
    ):
        table.add_row(name, text)
    return table


def _percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    values = np.percentile(np.asarray(seconds) * 1000.0, PERCENTILES)
    return {f"p{p}": float(value) for p, value in zip(PERCENTILES, values, strict=True)}


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "-"
