"""The peer: the Rust RadixTree of ``ai-dynamo-runtime``, in a process of its own.

Run by ``radix.py`` with the Python that has it; reads a command a line, answers a line.
A tree applies its events in a thread of its own, so what counts is the processor time of
all threads until it answers a question asked behind them.
"""

from __future__ import annotations

import json
import sys
import time

from dynamo._core import RadixTree

from benchmarks.router.workload import Stored, Workload


def block_hash(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big")


def tokens_hash(digest: bytes) -> int:
    return int.from_bytes(digest[8:16], "big")


class Peer:
    """One tree and what it is measured with."""

    def __init__(self, workers: int, blocks: int) -> None:
        self._workload = Workload(workers, blocks)
        self._tree = RadixTree()
        self._event = 0
        last: dict[tuple[int, int], bytes] = {}
        for stored in self._workload.resident():
            self._tree.apply_event(stored.worker, self._stored(stored, last))
        self._wait()

    def lookup(self, times: int) -> float:
        """Milliseconds of one look-up of the prompt of which everyone holds a part."""
        sequence = [tokens_hash(digest) for digest in self._workload.shared()]
        assert len(self._tree.find_matches(sequence).scores) == self._workload.workers
        began = time.process_time()
        for _ in range(times):
            self._tree.find_matches(sequence)
        return (time.process_time() - began) / times * 1e3

    def ingest(self, number: int, blocks: int) -> float:
        """Blocks a second, stored and removed again, decoding included."""
        last: dict[tuple[int, int], bytes] = {}
        news = self._workload.news(number, blocks)
        events = [(s.worker, self._stored(s, last)) for s in news]
        # From the end, as engines evict: a block before those that build on it stays.
        events += [(s.worker, self._removed(s)) for s in reversed(news)]
        began = time.process_time()
        for worker, event in events:
            self._tree.apply_event(worker, event)
        self._wait()
        return 2 * blocks / (time.process_time() - began)

    def _wait(self) -> None:
        self._tree.find_matches([0])

    def _stored(self, stored: Stored, last: dict[tuple[int, int], bytes]) -> bytes:
        parent = last.get((stored.worker, stored.chain)) if stored.start else None
        last[stored.worker, stored.chain] = stored.digests[-1]
        blocks = [
            {"block_hash": block_hash(digest), "tokens_hash": tokens_hash(digest)}
            for digest in stored.digests
        ]
        parent_hash = None if parent is None else block_hash(parent)
        return self._encoded({"stored": {"parent_hash": parent_hash, "blocks": blocks}})

    def _removed(self, stored: Stored) -> bytes:
        hashes = [block_hash(digest) for digest in reversed(stored.digests)]
        return self._encoded({"removed": {"block_hashes": hashes}})

    def _encoded(self, data: dict[str, object]) -> bytes:
        self._event += 1
        return json.dumps({"event_id": self._event, "data": data, "dp_rank": 0}).encode()


def main() -> None:
    peer: Peer | None = None
    for line in sys.stdin:
        verb, *numbers = json.loads(line)
        answer = 0.0
        if verb == "build":
            peer = None  # gives back what the one before held
            peer = Peer(*numbers)
        elif peer is not None:
            answer = getattr(peer, verb)(*numbers)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
