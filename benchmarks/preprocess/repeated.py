"""What a request with a picture that was seen before costs a frontend in processor time.

The floor is what nobody can save: parsing the request's JSON, decoding its base64 and
hashing the bytes, and the same request without a picture. Beside it, vLLM's own API
server with the same requests; its engine runs in other processes and does not count.

The second floor has the server receive the picture: a request without a picture that
carries as many bytes in a field that nobody looks at. It shows how much of what is above
the first floor is the arrival of the bytes, and how much is done about the picture.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import cache
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import pybase64
from blake3 import blake3

from benchmarks.client import Client
from benchmarks.metrics import Metric, median_ratio, rounded
from benchmarks.preprocess.cpu import cpu_seconds
from benchmarks.processes import CHECKPOINT
from benchmarks.prompts import picture_request, text_request

FLOOR, SPEEDUP = "repeat_12mp_over_floor", "repeat_speedup_over_vllm_12mp"
RECEIVED = "repeat_12mp_over_received_floor"
GOALS = {FLOOR: "<=1.3", SPEEDUP: ">=7", RECEIVED: None}
SIZE = (4000, 3000)
ROUNDS = 5
REQUESTS = 10
CHAT = "/v1/chat/completions"
MODEL = str(CHECKPOINT)
QUESTION = "What is this?"


def measure(
    picture: bytes, frontend: tuple[int, int], plain: tuple[int, int] | None
) -> list[Metric]:
    """Both servers are given as port and process id."""
    with_picture = picture_request(MODEL, picture, QUESTION, 1)
    text = text_request(MODEL, QUESTION, 1)
    text_and_bytes = _with_bytes_of(with_picture, text)
    ours: list[float] = []
    floors: list[float] = []
    received: list[float] = []
    theirs: list[float] = []
    with Client(frontend[0]) as client:
        for _ in range(3):
            client.post(CHAT, with_picture)
            client.post(CHAT, text)
            client.post(CHAT, text_and_bytes)
        for _ in range(ROUNDS):
            ours.append(_cost(client, frontend[1], with_picture, with_children=True))
            without = _cost(client, frontend[1], text, with_children=True)
            floors.append(without + _own_cost(lambda: _unavoidable(with_picture)))
            carried = _cost(client, frontend[1], text_and_bytes, with_children=True)
            received.append(carried + _own_cost(lambda: _decode_and_hash(with_picture)))
    metrics = [_over_floor(ours, floors, len(picture)), _over_received(ours, received)]
    if plain is None:
        return metrics
    with Client(plain[0]) as client:
        for _ in range(3):
            client.post(CHAT, with_picture)
        for _ in range(ROUNDS):
            theirs.append(_cost(client, plain[1], with_picture, with_children=False))
    speedup = rounded(median_ratio(theirs, ours))
    print(f"  vLLM's API server: {median(theirs) * 1e3:.1f} ms, {speedup} times as much")
    return [*metrics, Metric(SPEEDUP, speedup, "ratio", GOALS[SPEEDUP])]


def _over_floor(ours: list[float], floors: list[float], nbytes: int) -> Metric:
    ratio = rounded(median_ratio(ours, floors))
    print(
        f"  a seen picture of {SIZE[0]}x{SIZE[1]}, {nbytes / 1e6:.2f} MB, processor time "
        f"per request, medians of {ROUNDS} rounds of {REQUESTS}: "
        f"{median(ours) * 1e3:.2f} ms, floor {median(floors) * 1e3:.2f} ms",
        flush=True,
    )
    return Metric(FLOOR, ratio, "ratio", GOALS[FLOOR])


def _over_received(ours: list[float], floors: list[float]) -> Metric:
    ratio = rounded(median_ratio(ours, floors))
    print(f"  floor that has received its bytes {median(floors) * 1e3:.2f} ms", flush=True)
    return Metric(RECEIVED, ratio, "ratio", GOALS[RECEIVED])


def _cost(client: Client, pid: int, body: bytes, *, with_children: bool) -> float:
    """Seconds of processor time per request."""
    before = cpu_seconds(pid, with_children=with_children)
    for _ in range(REQUESTS):
        client.post(CHAT, body)
    return (cpu_seconds(pid, with_children=with_children) - before) / REQUESTS


def _own_cost(work: Callable[[], object]) -> float:
    began = time.thread_time()
    for _ in range(REQUESTS):
        work()
    return (time.thread_time() - began) / REQUESTS


def _with_bytes_of(picture_body: bytes, text_body: bytes) -> bytes:
    """A request for ``text_body``'s answer with the bytes of the picture's."""
    padding = "x" * (len(picture_body) - len(text_body))
    return json.dumps({**json.loads(text_body), "user": padding}).encode()


def _unavoidable(body: bytes) -> bytes:
    return _hash_of(json.loads(body))


def _decode_and_hash(body: bytes) -> bytes:
    return _hash_of(_parsed(body))


@cache
def _parsed(body: bytes) -> Any:
    return json.loads(body)


def _hash_of(request: Any) -> bytes:
    [message] = request["messages"]
    url = urlsplit(message["content"][0]["image_url"]["url"])
    data = pybase64.b64decode(url.path.partition(",")[2], validate=True)
    return blake3(data).digest()
