"""From the processor's output to a tensor that the model runner can use: how long?

Both ways through the same processes (``chain``), in turns. "Usable" is when the runner
has the tensor's shape and first byte; reading all of it is timed apart, since a mapping
pays for its pages when they are first read, and a copy has paid before.

Beside it the least that could be: plain vLLM's way with next to no pixels, which is what its
messages and wake-ups take, and one copy of the pixels in memory.
"""

from __future__ import annotations

import time
from itertools import pairwise
from statistics import median

import torch
from vllm.multimodal.inputs import MultiModalKwargsItem

from benchmarks.metrics import Metric, median_ratio, rounded
from benchmarks.path.chain import MIB, Chain, Passage, make_item

SIZES = (1, 8, 32)
GOALS = {8: "<=0.5"}
ROUNDS = 25
WARM_UP = 3
BARE_BYTES = 1024
"""Pixels of an item that is all message."""


def name_of(mib: int) -> str:
    return f"handover_ratio_{mib}mib"


def floor_name_of(mib: int) -> str:
    return f"handover_floor_ratio_{mib}mib"


def read_name_of(mib: int) -> str:
    return f"handover_and_read_ratio_{mib}mib"


async def measure(chain: Chain) -> list[Metric]:
    passages: dict[tuple[int, str], list[Passage]] = {}
    ways = {"plain": chain.pass_plain, "foveal": chain.pass_foveal}
    bare: dict[str, list[Passage]] = {}
    copies: dict[int, list[float]] = {}
    places = {mib: torch.ones(mib * MIB, dtype=torch.uint8) for mib in SIZES}
    number = 0
    for turn in range(-WARM_UP, ROUNDS):
        for way in sorted(ways, reverse=turn % 2 == 0):
            number += 1
            passage = await ways[way](make_item(BARE_BYTES, number))
            await chain.read_all(passage)
            if turn >= 0:
                bare.setdefault(way, []).append(passage)
            for mib in SIZES:
                number += 1
                passage = await ways[way](make_item(mib * MIB, number))
                await chain.read_all(passage)
                if turn >= 0:
                    passages.setdefault((mib, way), []).append(passage)
        for mib in SIZES:
            number += 1
            seconds = _copy(make_item(mib * MIB, number), places[mib])
            if turn >= 0:
                copies.setdefault(mib, []).append(seconds)
    print(
        f"  next to no pixels, milliseconds until usable: plain vLLM "
        f"{_ms(_until_usable(bare['plain']))}  Foveal {_ms(_until_usable(bare['foveal']))}"
    )
    metrics = []
    for mib in SIZES:
        plain, foveal = passages[mib, "plain"], passages[mib, "foveal"]
        metrics += _compare(mib, plain, foveal)
        metrics.append(_floor(mib, plain, bare["plain"], copies[mib]))
        _explain(plain, foveal)
    return metrics


def _copy(item: MultiModalKwargsItem, place: torch.Tensor) -> float:
    """Seconds for one copy of an item's pixels to memory that has been used before."""
    pixels = item["pixel_values"].data
    if not isinstance(pixels, torch.Tensor):
        raise TypeError("pixels are a tensor")
    began = time.monotonic()
    place.copy_(pixels.view(-1))
    return time.monotonic() - began


def _floor(
    mib: int, plain: list[Passage], bare: list[Passage], copies: list[float]
) -> Metric:
    """A message of vLLM's without pixels and one copy of them, over vLLM's message."""
    messages = _until_usable(bare)
    least = [message + copy for message, copy in zip(messages, copies, strict=True)]
    ratio = rounded(median_ratio(least, _until_usable(plain)))
    print(f"    one copy {_ms(copies)}, and with plain vLLM's message {_ms(least)}")
    return Metric(floor_name_of(mib), ratio, "ratio", None)


def _until_usable(passages: list[Passage]) -> list[float]:
    return [passage.seconds("started", "usable") for passage in passages]


def _compare(mib: int, plain: list[Passage], foveal: list[Passage]) -> list[Metric]:
    metrics = []
    print(f"  {mib} MiB, medians of {ROUNDS} rounds in milliseconds:")
    for until, name, goal in (
        ("usable", name_of(mib), GOALS.get(mib)),
        ("read", read_name_of(mib), None),
    ):
        ours = [passage.seconds("started", until) for passage in foveal]
        theirs = [passage.seconds("started", until) for passage in plain]
        ratio = rounded(median_ratio(ours, theirs))
        metrics.append(Metric(name, ratio, "ratio", goal))
        print(
            f"    until {until:6}  plain vLLM {_ms(theirs)}  Foveal {_ms(ours)}"
            f"  ratio {ratio}"
        )
    return metrics


def _explain(plain: list[Passage], foveal: list[Passage]) -> None:
    """Say where the time goes."""
    for way, passages, stages in (
        ("plain vLLM", plain, ("started", "sent", "decoded", "dequeued", "usable")),
        (
            "Foveal",
            foveal,
            ("started", "hashed", "stored", "sent", "received", "forwarded", "decoded",
             "dequeued", "usable"),
        ),
    ):
        steps = " ".join(
            f"{until} {_ms([p.seconds(since, until) for p in passages])}"
            for since, until in pairwise(stages)
        )
        print(f"      {way}: {steps}")


def _ms(seconds: list[float]) -> str:
    return f"{median(seconds) * 1e3:.2f}"
