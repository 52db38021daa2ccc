"""Clients that push pictures at a server, in a process of their own.

    python -m benchmarks.preprocess.load PORT MODEL CLIENTS COUNT FIRST_SEED

A line on standard output says when the pictures are made. A line on standard input starts
the clients; then the seconds they took are written. COUNT 0 goes on until standard input
is closed.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Iterator

from benchmarks.client import Client
from benchmarks.prompts import jpeg, picture_request

SIZE = (1024, 768)
CHAT = "/v1/chat/completions"
PREPARED = 64
"""Pictures are made before anything is timed. More than these differ behind their end:
for a server other bytes, for a decoder the same."""


def bodies(model: str, count: int, first_seed: int) -> Iterator[bytes]:
    """Requests with pictures no server has seen; endless when ``count`` is 0."""
    pictures = [jpeg(*SIZE, first_seed + number) for number in range(PREPARED)]
    for number in itertools.count() if not count else range(count):
        tail = (first_seed + number).to_bytes(8, "big")
        yield picture_request(model, pictures[number % PREPARED] + tail, "What?", 1)


def push(port: int, clients: int, requests: Iterator[bytes], stop: threading.Event) -> None:
    lock = threading.Lock()
    errors: list[BaseException] = []

    def send() -> None:
        try:
            with Client(port) as client:
                while not stop.is_set():
                    with lock:
                        body = next(requests, None)
                    if body is None:
                        return
                    client.post(CHAT, body)
        except BaseException as error:
            errors.append(error)
            stop.set()

    threads = [threading.Thread(target=send) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def main() -> None:
    port, clients, count, seed = (int(sys.argv[n]) for n in (1, 3, 4, 5))
    requests = bodies(sys.argv[2], count, seed)
    ready: Iterator[bytes] = iter(list(requests)) if count else _begun(requests)
    print("ready", flush=True)
    sys.stdin.readline()
    stop = threading.Event()
    if not count:
        threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    began = time.monotonic()
    push(port, clients, ready, stop)
    print(time.monotonic() - began, flush=True)


def _begun(requests: Iterator[bytes]) -> Iterator[bytes]:
    """The same, with the pictures made by now."""
    first = next(requests)
    return itertools.chain([first], requests)


if __name__ == "__main__":
    main()
