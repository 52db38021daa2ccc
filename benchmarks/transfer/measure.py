"""Hands items over in every way, in turns, and writes down how long it took.

Each way has its turn once per round, so that what slows the machine down for a while
slows all of them. Pairs are separate so that the peer runs in its own Python, and so that
its NIXL agents, which use processor time even when nothing moves, can be paused while the
others are measured.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.metrics import CannotMeasure, Metric
from benchmarks.transfer.endpoint import MEMORY_COPY
from benchmarks.transfer.figures import AFTER_PAUSE, AGAIN, FIRST, SIZES, Figures, wanted
from benchmarks.transfer.items import MIB
from benchmarks.transfer.pair import Pair, WayFailed
from benchmarks.transfer.peer_dynamo import dynamo_python

OURS = (
    MEMORY_COPY, "shm", "nixl", "inline", "message", "vllm_ipc", "torch_shm", "raw_nixl"
)
PEERS = ("dynamo_shm", "dynamo_nixl")
WAYS = (*OURS, *PEERS)
REPEATED = ("shm", "nixl", "message")
"""Ways that need not move an item again that the receiver has had."""
ROUNDS = {1: 25, 8: 41, 32: 15, 128: 5}
LEAST_ROUNDS = 3
SECONDS = {1: 15.0, 8: 50.0, 32: 50.0, 128: 50.0}
"""On a machine that is busy, rounds end when this is over."""
WARM_UP = 1
SECONDS_IDLE = 4.0
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def measure() -> list[Metric]:
    figures = Figures()
    with contextlib.ExitStack() as stack:
        pairs = _start(stack, figures)
        _open(pairs, figures)
        if "nixl" not in figures.failures:
            figures.idle_cores = _cores_used(pairs["nixl"].pids)
        number = 0
        for mib in SIZES:
            began = time.monotonic()
            for turn in range(-WARM_UP, ROUNDS[mib]):
                number += 1
                _round(pairs, figures, mib, number, turn)
                elapsed = time.monotonic() - began
                if turn + 1 >= LEAST_ROUNDS and elapsed > SECONDS[mib]:
                    break
            print(f"  {mib} MiB: {turn + 1} rounds in {elapsed:.0f} s", flush=True)
    _print_table(figures)
    return [each.of(figures) for each in wanted(WAYS)]


def _start(stack: contextlib.ExitStack, figures: Figures) -> dict[str, Pair]:
    """Start all pairs at once; the ways whose pair does not start have failed."""
    pairs = {}
    shared = stack.enter_context(Pair("ours", Path(sys.executable)))
    for way in OURS:
        pairs[way] = shared
    try:
        python = dynamo_python()
        for way in PEERS:
            pairs[way] = stack.enter_context(Pair(way, python))
    except CannotMeasure as why:
        figures.failures.update(dict.fromkeys(PEERS, str(why)))
    print("  starting the processes", flush=True)
    shared.wait()
    for way in PEERS:
        if way in pairs:
            try:
                pairs[way].wait()
            except CannotMeasure as why:
                _fail(figures, way, str(why))
    return pairs


def _open(pairs: dict[str, Pair], figures: Figures) -> None:
    for way in WAYS:
        if way in figures.failures:
            continue
        try:
            pairs[way].open(way)
        except WayFailed as why:
            _fail(figures, way, str(why))
        if way in PEERS:
            pairs[way].pause()


def _round(
    pairs: dict[str, Pair], figures: Figures, mib: int, number: int, turn: int
) -> None:
    """Give every way its turn, each round in another order."""
    first = turn % len(WAYS)
    for way in (*WAYS[first:], *WAYS[:first]):
        if way in figures.failures:
            continue
        pair = pairs[way]
        with contextlib.ExitStack() as stack:
            if way in PEERS:
                pair.resume()
                stack.callback(pair.pause)
            try:
                results = {FIRST: pair.hand_over(way, mib * MIB, number)}
                if way in REPEATED:
                    for when, pause in ((AGAIN, False), (AFTER_PAUSE, True)):
                        results[when] = pair.hand_over(
                            way, mib * MIB, number, again=True, pause=pause
                        )
            except WayFailed as why:
                _fail(figures, way, str(why))
                continue
        if turn >= 0:
            for when, result in results.items():
                figures.results[way, mib, when].append(result)


def _fail(figures: Figures, way: str, why: str) -> None:
    print(f"  {way} does not work here: {why}", flush=True)
    figures.failures[way] = why


def _cores_used(pids: Sequence[int]) -> float:
    """Return how many cores these processes use together while they wait."""
    before = sum(map(_seconds_used, pids))
    time.sleep(SECONDS_IDLE)
    return (sum(map(_seconds_used, pids)) - before) / SECONDS_IDLE


def _seconds_used(pid: int) -> float:
    stat = Path(f"/proc/{pid}/stat").read_text()
    user, system = stat[stat.rindex(")") + 2 :].split()[11:13]
    return (int(user) + int(system)) / _TICKS_PER_SECOND


def _print_table(figures: Figures) -> None:
    print("\n  Median milliseconds until usable (until all of it has been read):")
    print(f"  {'':12}" + "".join(f"{f'{mib} MiB':>20}" for mib in SIZES))
    for way in WAYS:
        if way in figures.failures:
            continue
        usable = [_ms(figures.seconds(way, mib)) for mib in SIZES]
        read = [f"({_ms(figures.read_seconds(way, mib))})" for mib in SIZES]
        cells = (f"{one:>10} {other:>9}" for one, other in zip(usable, read, strict=True))
        print(f"  {way:12}{''.join(cells)}")
    for way in REPEATED:
        if way not in figures.failures:
            for when in (AGAIN, AFTER_PAUSE):
                _print_repeats(figures, way, when)


def _print_repeats(figures: Figures, way: str, when: str) -> None:
    """Where the time of one that was sent before goes, of the largest size."""
    results = figures.results[way, SIZES[-1], when]
    sent = [result.sent for result in results]
    under_way = [result.received - result.sent for result in results]
    read = [result.usable - result.received for result in results]
    print(
        f"  {way} {when}, by size: "
        + " ".join(_ms(figures.seconds(way, mib, when)) for mib in SIZES)
        + f"; of the last: until sent {_ms(sent)}, under way {_ms(under_way)}, "
        f"until usable {_ms(read)}"
    )


def _ms(seconds: Sequence[float]) -> str:
    return f"{median(seconds) * 1e3:.2f}"
