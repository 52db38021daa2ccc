"""Whole servers: text requests beside plain vLLM's, and KV routing beside round-robin.

Text goes through a frontend in kv mode to one worker and, in turns, to vLLM's own server:
one engine on either side, since a second one would poll its queues on the same cores, as
it never does on a machine of its own. Then vLLM's server is stopped, and a second worker
and a second frontend, in round-robin mode, are started: both modes get the same requests
in the same order, in turns, with empty caches each time.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.client import Client
from benchmarks.metrics import Metric, median_ratio, rounded
from benchmarks.processes import CHECKPOINT, Servers, free_ports, is_up, ready_workers
from benchmarks.prompts import jpeg, picture_request, text_request

TEXT, CACHED, THROUGHPUT = "text_latency_ratio", "kv_cached_ratio", "kv_throughput_ratio"
GOALS = {TEXT: "<=1.15", CACHED: ">=1.25", THROUGHPUT: ">=1.1"}

WORKERS = 2
MODEL = str(CHECKPOINT)
CHAT = "/v1/chat/completions"

TEXT_ROUNDS = 10
TEXT_REQUESTS = 8
TEXT_PROMPT_TOKENS = 64
TEXT_OUTPUT_TOKENS = 16
SETTLE_SECONDS = 1.2
"""A model runner polls its queue busily for a second after a step, and has few cores to
do so on: nobody is measured while the one before still does."""

PICTURES = 20
REQUESTS_PER_PICTURE = 4
PICTURE_SIZE = (1024, 768)
CONCURRENCY = 4
KV_ROUNDS = 3
KV_OUTPUT_TOKENS = 8


def measure() -> list[Metric]:
    with Servers() as servers:
        kv, round_robin, plain = free_ports(3)
        servers.start_worker("worker-1")
        reference = servers.start_plain("plain-vllm", plain)
        servers.start_frontend("frontend-kv", kv)
        servers.wait(
            "fleet and plain vLLM", lambda: is_up(plain) and ready_workers(kv) == 1
        )
        metrics = [_text_latency(kv, plain)]
        servers.stop(reference)
        servers.start_worker("worker-2")
        servers.start_frontend(
            "frontend-round-robin", round_robin, "--router-mode", "round-robin"
        )
        servers.wait(
            "the second worker and frontend",
            lambda: ready_workers(kv) == ready_workers(round_robin) == WORKERS,
        )
        return metrics + _kv_routing(kv, round_robin)


def _text_latency(fleet: int, plain: int) -> Metric:
    prompts = Prompts()
    medians: dict[str, list[float]] = {"fleet": [], "plain": []}
    with Client(fleet) as to_fleet, Client(plain) as to_plain:
        clients = {"fleet": to_fleet, "plain": to_plain}
        for client in clients.values():
            prompts.fit(client)
            for _ in range(2 * TEXT_REQUESTS):
                _timed(client, prompts.next())
        for turn in range(TEXT_ROUNDS):
            for side in sorted(clients, reverse=turn % 2 == 0):
                time.sleep(SETTLE_SECONDS)
                _timed(clients[side], prompts.next())  # whoever slept wakes up
                latencies = [
                    _timed(clients[side], prompts.next()) for _ in range(TEXT_REQUESTS)
                ]
                medians[side].append(median(latencies))
    ratio = rounded(median_ratio(medians["fleet"], medians["plain"]))
    print(
        f"  text, {TEXT_PROMPT_TOKENS} tokens in, {TEXT_OUTPUT_TOKENS} out, one at a time, "
        f"medians of {TEXT_ROUNDS} rounds of {TEXT_REQUESTS}: "
        f"plain vLLM {median(medians['plain']) * 1e3:.1f} ms, "
        f"Foveal {median(medians['fleet']) * 1e3:.1f} ms, ratio {ratio}",
        flush=True,
    )
    return Metric(TEXT, ratio, "ratio", GOALS[TEXT])


class Prompts:
    """Text requests of one length, no two alike from the first token that differs on."""

    def __init__(self) -> None:
        self._rng = random.Random(1)
        self._length = TEXT_PROMPT_TOKENS // 2

    def next(self) -> bytes:
        text = "".join(self._rng.choices("abcdefghijklmnopqrstuvwxyz", k=self._length))
        return text_request(MODEL, text, TEXT_OUTPUT_TOKENS)

    def fit(self, client: Client) -> None:
        """Find the length that makes a prompt of the wanted tokens: one byte is one."""
        used = client.post(CHAT, self.next())["usage"]["prompt_tokens"]
        self._length += TEXT_PROMPT_TOKENS - used


def _timed(client: Client, body: bytes) -> float:
    began = time.monotonic()
    answer = client.post(CHAT, body)
    seconds = time.monotonic() - began
    usage = answer["usage"]
    if usage["completion_tokens"] != TEXT_OUTPUT_TOKENS:
        raise ValueError(f"asked for {TEXT_OUTPUT_TOKENS} tokens: {usage}")
    return seconds


@dataclass(frozen=True)
class Load:
    """What one run of all requests gave."""

    cached_tokens: int
    prompt_tokens: int
    seconds: float
    requests: int

    @property
    def rate(self) -> float:
        return self.requests / self.seconds


def _kv_routing(kv: int, round_robin: int) -> list[Metric]:
    ports = {"kv": kv, "round-robin": round_robin}
    pictures = [jpeg(*PICTURE_SIZE, seed=1000 + number) for number in range(PICTURES)]
    loads: dict[str, list[Load]] = {mode: [] for mode in ports}
    for mode in ports:  # everything has run once before it is timed
        _run(ports[mode], _bodies(pictures[:2], 0))
    for turn in range(KV_ROUNDS):
        bodies = _bodies(pictures, seed=turn)
        for mode in sorted(ports, reverse=turn % 2 == 0):
            _clear_caches(ports.values())
            loads[mode].append(load := _run(ports[mode], bodies))
            print(
                f"  round {turn + 1}, {mode:11}: {load.rate:.2f} requests/s, "
                f"{load.cached_tokens} of {load.prompt_tokens} prompt tokens cached",
                flush=True,
            )
    cached = median_ratio(
        [load.cached_tokens for load in loads["kv"]],
        [load.cached_tokens for load in loads["round-robin"]],
    )
    rate = median_ratio(
        [load.rate for load in loads["kv"]], [load.rate for load in loads["round-robin"]]
    )
    return [
        Metric(CACHED, rounded(cached), "ratio", GOALS[CACHED]),
        Metric(THROUGHPUT, rounded(rate), "ratio", GOALS[THROUGHPUT]),
    ]


def _bodies(pictures: Sequence[bytes], seed: int) -> list[bytes]:
    """All requests in random order, the same for the same seed."""
    bodies = [
        picture_request(MODEL, picture, f"Question {number} of {seed}?", KV_OUTPUT_TOKENS)
        for picture in pictures
        for number in range(REQUESTS_PER_PICTURE)
    ]
    random.Random(seed).shuffle(bodies)
    return bodies


def _clear_caches(ports: Iterable[int]) -> None:
    for port in ports:
        with Client(port) as client:
            for cache in ("prefix", "mm", "encoder"):
                client.post(f"/reset_{cache}_cache")


def _run(port: int, bodies: Sequence[bytes]) -> Load:
    """Send all requests, a few at a time; each thread takes the next one."""
    waiting = iter(bodies)
    lock = threading.Lock()
    usages: list[dict[str, Any]] = []

    def send_some() -> None:
        with Client(port) as client:
            while True:
                with lock:
                    body = next(waiting, None)
                if body is None:
                    return
                usages.append(client.post(CHAT, body)["usage"])

    began = time.monotonic()
    with ThreadPoolExecutor(CONCURRENCY) as threads:
        for sender in [threads.submit(send_some) for _ in range(CONCURRENCY)]:
            sender.result()
    seconds = time.monotonic() - began
    return Load(
        cached_tokens=sum(_cached_tokens(usage) for usage in usages),
        prompt_tokens=sum(usage["prompt_tokens"] for usage in usages),
        seconds=seconds,
        requests=len(usages),
    )


def _cached_tokens(usage: dict[str, Any]) -> int:
    details = usage.get("prompt_tokens_details") or {}
    return details.get("cached_tokens") or 0
