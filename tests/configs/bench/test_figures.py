"""From answers to figures."""

from __future__ import annotations

import io

from rich.console import Console

from configs.bench.figures import figures_of, figures_table
from configs.bench.load import Answer


def answer(*tokens_at: float) -> Answer:
    return Answer(
        first_token=tokens_at[0], tokens_at=list(tokens_at), end=tokens_at[-1],
        prompt_tokens=100, completion_tokens=len(tokens_at), cached_tokens=50, worker="w",
    )


def test_times_are_percentiles_in_milliseconds() -> None:
    figures = figures_of([answer(0.1, 0.2), answer(0.3, 0.6)], 2.0)
    assert round(figures["ttft_ms"]["p50"]) == 200
    assert round(figures["inter_token_ms"]["p50"]) == 200
    assert round(figures["latency_ms"]["p50"]) == 400
    assert figures["requests_per_second"] == 1.0
    assert figures["output_tokens_per_second"] == 2.0
    assert figures["cached_share"] == 0.5


def test_the_table_shows_them_and_the_errors() -> None:
    output = io.StringIO()
    figures = figures_of([answer(0.1, 0.2), Answer(error="503: busy")], 1.0)
    Console(file=output, width=100).print(figures_table(figures))
    text = output.getvalue()
    assert "50 of 100 prompt tokens (50%)" in text
    assert "1 of 2" in text and "100.0" in text
    assert figures["error_texts"] == {"503: busy": 1}


def test_nothing_measured_is_no_figure() -> None:
    figures = figures_of([], 0.0)
    assert figures["ttft_ms"] is None and figures["requests_per_second"] is None
    figures_table(figures)
