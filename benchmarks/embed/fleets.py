"""Two fleets side by side: workers that share encoder outputs, and one that does not.

At most three engines run at once. An engine's own encoder cache is as large as the largest
item, a video of as many tokens as six of the images here: asking about more of them in
turns evicts each before it is asked about again. The KV cache is emptied before every
question, so what is left is the host's cache.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from statistics import median

from benchmarks.client import Client
from benchmarks.embed import checkpoint
from benchmarks.metrics import CannotMeasure, Metric, median_ratio, rounded
from benchmarks.processes import ROOT, Servers, free_ports, ready_workers
from benchmarks.prompts import jpeg, picture_request, pictures_request

TTFT, RUNS = "ttft_embed_cache_on_over_off", "encoder_runs_per_image"
ENCODE_WORKER = "ttft_encode_worker_over_none"
PROMISED: list[tuple[str, str, str | None]] = [
    (TTFT, "ratio", "<=0.7"), (RUNS, "runs", "==1"), (ENCODE_WORKER, "ratio", None),
]

MODEL = ROOT / ".demo" / "embed-checkpoint"
CHAT = "/v1/chat/completions"
SIZE = (2048, 1536)
"""More than the checkpoint's largest; its processor brings it down to 1,200 tokens or so."""
PICTURES = 7
TOKENS = 1200
"""That each of them has at least."""
ROUNDS = 5
NEW_PICTURES = 8
"""Of which the first, on either side, is not counted."""
TOLD_SECONDS = 20.0
SMALL_ENCODER_CACHE = ("--max-num-batched-tokens", "2048")
SHARED = ("--multimodal-embedding-cache-capacity-gb", "0.5")


def measure() -> Iterator[Metric]:
    pictures = [jpeg(*SIZE, seed=3000 + number) for number in range(PICTURES)]
    checkpoint.save(MODEL)
    with Servers(MODEL) as servers:
        on, off = free_ports(2)
        _, second = (
            servers.start_worker(name, *SMALL_ENCODER_CACHE, *SHARED)
            for name in ("sharing-1", "sharing-2")
        )
        servers.start_worker("alone", *SMALL_ENCODER_CACHE, "--namespace", "alone")
        servers.start_frontend("frontend-on", on, "--router-mode", "round-robin")
        servers.start_frontend("frontend-off", off, "--namespace", "alone")
        servers.wait(
            "both fleets", lambda: ready_workers(on) == 2 and ready_workers(off) == 1
        )
        _check_own_caches(on, off)
        yield _runs_per_image(on, pictures)
        yield _ttft(on, off, pictures)
        servers.stop(second)
        servers.start_worker("encoder", *SMALL_ENCODER_CACHE, *SHARED, "--role", "encode")
        servers.wait("the encode worker", lambda: _ready_roles(on) == ["encode", "generate"])
        yield _encode_worker(on, off)


def _check_own_caches(*ports: int) -> None:
    """
    Raises:
        CannotMeasure: an engine's own cache keeps images, so that nothing is encoded again.
    """
    for port in ports:
        with Client(port) as client:
            for worker in client.get("/v1/fleet")["workers"]:
                tokens = worker["facts"]["encoder_cache_tokens"]
                if tokens >= PICTURES * TOKENS:
                    raise CannotMeasure(f"engines keep {tokens} tokens of encoder outputs")


def _runs_per_image(port: int, pictures: Sequence[bytes]) -> Metric:
    """Ask each worker about each image; round-robin sees to it that both are asked."""
    with Client(port) as client:
        for number in range(2):
            for picture in pictures:
                _ask(client, picture, f"Worker {number}?")
            # An even number of questions would ask the same worker of an image again.
            if len(pictures) % 2 == 0:
                _ask(client, pictures[0], "The other one.")
        _await(client, "embedding_loads", len(pictures))
        runs, loads = _sum(client, "encoder_runs"), _sum(client, "embedding_loads")
    print(
        f"  {len(pictures)} images, each asked of two workers: "
        f"{runs} encoder runs, {loads} outputs loaded",
        flush=True,
    )
    return Metric(RUNS, rounded(runs / len(pictures)), "runs", "==1")


def _ttft(on: int, off: int, pictures: Sequence[bytes]) -> Metric:
    seconds: dict[str, list[float]] = {"on": [], "off": []}
    with Client(on) as sharing, Client(off) as alone:
        clients = {"on": sharing, "off": alone}
        for picture in pictures:  # seen once by either fleet before anything is timed
            for client in clients.values():
                _ask(client, picture, "Before.")
        for turn in range(ROUNDS):
            for number, picture in enumerate(pictures):
                for side in sorted(clients, reverse=(turn + number) % 2 == 0):
                    client = clients[side]
                    client.post("/reset_prefix_cache")
                    began = time.monotonic()
                    _ask(client, picture, "Again?")
                    seconds[side].append(time.monotonic() - began)
    ratio = rounded(median_ratio(seconds["on"], seconds["off"]))
    print(
        f"  time to the first token about an image seen before, KV evicted, medians of "
        f"{ROUNDS * len(pictures)}: shared outputs {median(seconds['on']) * 1e3:.0f} ms, "
        f"none {median(seconds['off']) * 1e3:.0f} ms, ratio {ratio}",
        flush=True,
    )
    return Metric(TTFT, ratio, "ratio", "<=0.7")


def _encode_worker(on: int, off: int) -> Metric:
    """New images, two in each request, so that there is something to do side by side."""
    seconds: dict[str, list[float]] = {"on": [], "off": []}
    new = [
        (jpeg(*SIZE, seed=4000 + 2 * number), jpeg(*SIZE, seed=4001 + 2 * number))
        for number in range(NEW_PICTURES)
    ]
    with Client(on) as helped, Client(off) as alone:
        clients = {"on": helped, "off": alone}
        for number, pictures in enumerate(new):
            for side in sorted(clients, reverse=number % 2 == 0):
                began = time.monotonic()
                clients[side].post(CHAT, pictures_request(str(MODEL), pictures, "New?", 1))
                seconds[side].append(time.monotonic() - began)
    ratio = rounded(median_ratio(seconds["on"][1:], seconds["off"][1:]))
    print(
        f"  time to the first token about two new images, medians of {NEW_PICTURES - 1}: one "
        f"worker and an encode worker {median(seconds['on'][1:]) * 1e3:.0f} ms, one worker "
        f"{median(seconds['off'][1:]) * 1e3:.0f} ms, ratio {ratio}",
        flush=True,
    )
    return Metric(ENCODE_WORKER, ratio, "ratio")


def _ask(client: Client, picture: bytes, question: str) -> None:
    """For one token: the answer's time is the time to the first."""
    client.post(CHAT, picture_request(str(MODEL), picture, question, 1))


def _ready_roles(port: int) -> list[str]:
    with Client(port) as client:
        workers = client.get("/v1/fleet")["workers"]
    return sorted(worker["facts"]["role"] for worker in workers if worker["ready"])


def _sum(client: Client, count: str) -> int:
    return sum(worker[count] for worker in client.get("/v1/fleet")["workers"])


def _await(client: Client, count: str, value: int) -> None:
    """Workers tell their counts several times a second."""
    deadline = time.monotonic() + TOLD_SECONDS
    while _sum(client, count) < value and time.monotonic() < deadline:
        time.sleep(0.1)
