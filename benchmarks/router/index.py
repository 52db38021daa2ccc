"""The index, filled as a large fleet fills it: look-ups, ingestion, memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from benchmarks.metrics import CannotMeasure, Metric, median_ratio, rounded, unmeasured
from benchmarks.router.radix import RadixPeer
from benchmarks.router.workload import CHAIN, Stored, Workload
from frontend.router.kv_index import KvIndex
from frontend.router.kv_plane import KvPlane
from transfer.messages import KvDelta, KvSnapshot, decode, encode

WORKERS = (64, 8, 256)
"""64 first: what memory it takes is only seen in a fresh process."""

BLOCKS = 1_000_000
ROUNDS = 5
LOOKUPS = 100
NEWS = 50_000

LOOKUP = ("lookup_ms_256_workers", "ms", "<=0.3")
INGEST = ("ingest_blocks_per_s", "blocks/s", ">=1000000")
BYTES = ("bytes_per_block", "B", "<=250")
LOOKUP_SPEEDUP = ("lookup_speedup_over_radix", "ratio", None)
INGEST_SPEEDUP = ("ingest_speedup_over_radix", "ratio", None)
PROMISED = [LOOKUP, INGEST, BYTES, LOOKUP_SPEEDUP, INGEST_SPEEDUP]


class Filled:
    """An index with ``BLOCKS`` resident blocks, kept by a KV plane."""

    def __init__(self, workers: int) -> None:
        self.workload = Workload(workers, BLOCKS)
        self.index = KvIndex()
        self._plane = KvPlane(self.index)
        self._seqs = [0] * workers
        for worker in range(workers):
            self._plane.on_ready(f"w{worker}", "e")
            self._plane.on_snapshot(f"w{worker}", KvSnapshot("e", 0, {}))
        before = _resident_bytes()
        for frame, worker in self._deltas(self.workload.resident(), "stored"):
            self._apply(frame, worker)
        self.bytes_per_block = (_resident_bytes() - before) / BLOCKS

    def lookup_ms(self, times: int) -> float:
        """Milliseconds of one look-up of the prompt of which everyone holds a part."""
        expected = {f"w{n}": depth for n, depth in enumerate(self.workload.depths())}
        # Made anew each time: Python keeps a hash with the object once it is computed.
        prompts = [self.workload.shared() for _ in range(times)]
        began = time.thread_time()
        for prompt in prompts:
            found = self.index.overlap(prompt)
        elapsed = time.thread_time() - began
        if found != expected:
            raise CannotMeasure("the index is wrong")
        return elapsed / times * 1e3

    def ingest_rate(self, number: int, blocks: int) -> float:
        """Blocks a second, stored and removed again, decoding included."""
        news = self.workload.news(number, blocks)
        frames = list(self._deltas(news, "stored"))
        frames += self._deltas(reversed(news), "removed")
        before = len(self.index)
        began = time.thread_time()
        for frame, worker in frames:
            self._apply(frame, worker)
        elapsed = time.thread_time() - began
        if len(self.index) != before:
            raise CannotMeasure("the index keeps what was removed")
        return 2 * blocks / elapsed

    def _deltas(
        self, stored: Iterator[Stored] | list[Stored], verb: str
    ) -> Iterator[tuple[bytes, str]]:
        """What comes out of the socket, and from which worker."""
        for each in stored:
            seq = self._seqs[each.worker] = self._seqs[each.worker] + 1
            delta = KvDelta(epoch="e", seq=seq, **{verb: {"GPU": each.digests}})
            yield bytes(encode(delta)[0]), f"w{each.worker}"

    def _apply(self, frame: bytes, worker: str) -> None:
        message, _ = decode([frame])
        if not isinstance(message, KvDelta) or self._plane.on_delta(worker, message):
            raise CannotMeasure("the KV plane has lost count")


def measure() -> list[Metric]:
    with ExitStack() as stack:
        why = ""
        peer = None
        try:
            peer = stack.enter_context(RadixPeer())
        except CannotMeasure as error:
            why = str(error)
        lookups, rates = {}, []
        lookup_ratios, ingest_ratios = [], []
        bytes_per_block = 0.0
        for workers in WORKERS:
            filled = Filled(workers)
            if workers == WORKERS[0]:
                bytes_per_block = filled.bytes_per_block
            if peer is not None:
                peer.ask("build", workers, BLOCKS)
            ours, theirs = _in_turns(filled, peer)
            del filled
            gc.collect()
            lookups[workers] = median(ours["lookup"])
            rates.append(median(ours["ingest"]))
            _show(workers, ours, theirs)
            if theirs["lookup"]:
                lookup_ratios.append(median_ratio(theirs["lookup"], ours["lookup"]))
                ingest_ratios.append(median_ratio(ours["ingest"], theirs["ingest"]))
    metrics = [
        Metric(LOOKUP[0], rounded(lookups[256]), *LOOKUP[1:]),
        Metric(INGEST[0], rounded(min(rates)), *INGEST[1:]),
        Metric(BYTES[0], rounded(bytes_per_block), *BYTES[1:]),
    ]
    if not lookup_ratios:
        return metrics + unmeasured([LOOKUP_SPEEDUP, INGEST_SPEEDUP], why)
    return [
        *metrics,
        Metric(LOOKUP_SPEEDUP[0], rounded(lookup_ratios[-1]), *LOOKUP_SPEEDUP[1:]),
        Metric(INGEST_SPEEDUP[0], rounded(min(ingest_ratios)), *INGEST_SPEEDUP[1:]),
    ]


def _in_turns(
    filled: Filled, peer: RadixPeer | None
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    ours: dict[str, list[float]] = {"lookup": [], "ingest": []}
    theirs: dict[str, list[float]] = {"lookup": [], "ingest": []}
    for number in range(ROUNDS):
        ours["lookup"].append(filled.lookup_ms(LOOKUPS))
        if peer is not None:
            theirs["lookup"].append(peer.ask("lookup", LOOKUPS))
        ours["ingest"].append(filled.ingest_rate(number, NEWS))
        if peer is not None:
            theirs["ingest"].append(peer.ask("ingest", number, NEWS))
    return ours, theirs


def _show(workers: int, ours: dict[str, list[float]], theirs: dict[str, list[float]]) -> None:
    for name, figures in (("ours", ours), ("RadixTree", theirs)):
        if figures["lookup"]:
            print(
                f"  {workers:3} workers, {name}: look-up of {CHAIN} blocks "
                f"{median(figures['lookup']):.3f} ms, ingestion "
                f"{median(figures['ingest']) / 1e6:.2f} M blocks/s",
                flush=True,
            )


def _resident_bytes() -> int:
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024
