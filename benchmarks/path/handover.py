"""From the processor's output to a tensor that the model runner can use: how long?

Both ways through the same processes (``chain``), in turns. "Usable" is when the runner
has the tensor's shape and first byte; reading all of it is timed apart, since a mapping
pays for its pages when they are first read, and a copy has paid before.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import median

from benchmarks.metrics import Metric, median_ratio, rounded
from benchmarks.path.chain import MIB, Chain, Passage, make_item

SIZES = (1, 8, 32)
GOALS = {8: "<=0.5"}
ROUNDS = 25
WARM_UP = 3


def name_of(mib: int) -> str:
    return f"handover_ratio_{mib}mib"


def read_name_of(mib: int) -> str:
    return f"handover_and_read_ratio_{mib}mib"


async def measure(chain: Chain) -> list[Metric]:
    passages: dict[tuple[int, str], list[Passage]] = {}
    ways = {"plain": chain.pass_plain, "foveal": chain.pass_foveal}
    number = 0
    for turn in range(-WARM_UP, ROUNDS):
        for mib in SIZES:
            for way in sorted(ways, reverse=turn % 2 == 0):
                number += 1
                passage = await ways[way](make_item(mib * MIB, number))
                await chain.read_all(passage)
                if turn >= 0:
                    passages.setdefault((mib, way), []).append(passage)
    metrics = []
    for mib in SIZES:
        plain, foveal = passages[mib, "plain"], passages[mib, "foveal"]
        metrics += _compare(mib, plain, foveal)
        _explain(plain, foveal)
    return metrics


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
