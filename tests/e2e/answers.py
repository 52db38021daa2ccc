"""What two servers must agree on of an answer, and how it is compared."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import httpx

LOGPROB_TOLERANCE = 1e-4

# Made up for each answer, or about the server and not the answer.
UNCOMPARED = frozenset({
    "id", "created", "created_at", "completed_at", "item_id", "call_id", "request_id",
    "input_tokens_details", "prompt_tokens_details", "cached_tokens",
    "cache_read_input_tokens", "cache_creation_input_tokens", "cached_tokens_per_turn",
    "input_tokens_per_turn", "output_tokens_per_turn", "kv_transfer_params",
    "system_fingerprint", "metrics",
})

STRUNG_TOGETHER = frozenset({"content", "text", "arguments", "partial_json", "delta"})


def answer_of(response: httpx.Response) -> Any:
    """The answer in the shape that ``differences`` compares, streamed or not."""
    if response.headers["content-type"].startswith("text/event-stream"):
        return joined(events_of(response.iter_lines()))
    return response.json()


def events_of(lines: Iterable[str]) -> list[dict[str, Any]]:
    """The events of a stream, its end mark left out."""
    data = (line.removeprefix("data:").strip() for line in lines if line.startswith("data:"))
    return [json.loads(text) for text in data if text != "[DONE]"]


def joined(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """All events of a stream as one answer: how it was cut into events is left to chance.

    Texts and lists of the same place are strung together; other values are kept as the
    last event states them.
    """
    whole: dict[str, Any] = {}
    for event in events:
        kind = event.get("type")
        if isinstance(kind, str):
            # Responses and messages name their events; those of a name belong together.
            _join(whole.setdefault(kind, {}), event)
        else:
            _join(whole, event)
    return whole


def _join(whole: dict[str, Any], news: Mapping[str, Any]) -> None:
    for key, value in news.items():
        if key in UNCOMPARED or value is None or key == "sequence_number":
            continue
        held = whole.get(key)
        if isinstance(value, Mapping):
            _join(whole.setdefault(key, {}), value)
        elif isinstance(value, list) and all(_has_index(v) for v in value):
            by_index = whole.setdefault(key, {})
            for element in value:
                _join(by_index.setdefault(element["index"], {}), element)
        elif held and (isinstance(value, list) or key in STRUNG_TOGETHER):
            whole[key] = held + value
        else:
            whole[key] = value


def _has_index(value: Any) -> bool:
    return isinstance(value, Mapping) and "index" in value


def differences(ours: Any, theirs: Any, place: str = "answer") -> list[str]:
    """Where two answers differ, numbers by more than the tolerance."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return [
            difference
            for key in sorted(ours.keys() | theirs.keys(), key=str)
            if key not in UNCOMPARED
            for difference in differences(
                ours.get(key), theirs.get(key), f"{place}.{key}"
            )
        ]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [
            difference
            for index, (our, their) in enumerate(zip(ours, theirs, strict=True))
            for difference in differences(our, their, f"{place}[{index}]")
        ]
    if isinstance(ours, float) and isinstance(theirs, float | int):
        close = math.isclose(ours, theirs, rel_tol=0.0, abs_tol=LOGPROB_TOLERANCE)
        return [] if close else [f"{place}: {ours!r}, not {theirs!r}"]
    return [] if ours == theirs else [f"{place}: {ours!r}, not {theirs!r}"]
