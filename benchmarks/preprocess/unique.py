"""Pictures that nobody has seen: how many, how they hinder others, and how often.

``unique_over_vllm``: the whole frontend, HTTP included, beside vLLM's renderer alone,
which decodes and processes in this process, each with the machine to itself in turns.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from statistics import median, quantiles
from typing import Any

from benchmarks.client import Client
from benchmarks.metrics import Metric, median_ratio, rounded
from benchmarks.preprocess.pool_rate import FLAGS
from benchmarks.processes import CHECKPOINT
from benchmarks.prompts import jpeg, picture_request, text_request

RATE = "unique_over_vllm"
HEALTH = "health_p99_ms_under_load"
TEXT = "text_p99_ms_under_load"
OTHERS = {HEALTH: "GET /health", TEXT: "a chat of text only"}
BURST = "same_image_burst_processed"
ROUNDS = 3
PICTURES = 60
CLIENTS = 8
LOAD_CLIENTS = 32
PROBES = 250
PROBE_SECONDS = 0.02
OTHERS_MS = 25.0
BURST_SIZE = 64
CHAT = "/v1/chat/completions"


def measure_rate(port: int) -> Metric:
    ours: list[float] = []
    theirs: list[float] = []
    renderer = Renderer()
    for turn in range(-1, ROUNDS):
        with clients(port, CLIENTS, PICTURES, 10_000 + 1000 * turn) as load:
            rate = PICTURES / float(_answer(load, "go"))
        reference = renderer.rate(20_000 + 1000 * turn)
        if turn >= 0:
            ours.append(rate)
            theirs.append(reference)
    print(
        f"  unique 1024x768 pictures, medians of {ROUNDS} rounds of {PICTURES}: through the "
        f"frontend {median(ours):.1f}/s, vLLM's renderer alone {median(theirs):.1f}/s",
        flush=True,
    )
    return Metric(RATE, rounded(median_ratio(ours, theirs)), "ratio", ">=1.0")


class Renderer:
    """vLLM's renderer as it is, without a server around it."""

    def __init__(self) -> None:
        from vllm.renderers.params import ChatParams
        from vllm.renderers.registry import renderer_from_config

        from frontend.command_line import parse
        from frontend.vllm_seams import frontend_config

        _, args = parse([*FLAGS, "--mm-processor-cache-gb", "1"])
        self._renderer = renderer_from_config(frontend_config(args))
        self._params = ChatParams()

    def rate(self, first_seed: int) -> float:
        """Images per second that it gets ready for an engine."""
        pictures = (jpeg(1024, 768, first_seed + number) for number in range(PICTURES))
        bodies = [picture_request(str(CHECKPOINT), each, "What?", 1) for each in pictures]
        began = time.monotonic()
        asyncio.run(self._render([json.loads(body)["messages"] for body in bodies]))
        return PICTURES / (time.monotonic() - began)

    async def _render(self, conversations: list[Any]) -> None:
        limit = asyncio.Semaphore(CLIENTS)

        async def render(messages: Any) -> None:
            async with limit:
                await self._renderer.render_chat_async([messages], self._params)

        await asyncio.gather(*map(render, conversations))


def measure_others(port: int) -> list[Metric]:
    """How long those wait who push no pictures, while others do."""
    idle = _p99s_ms(port)
    with clients(port, LOAD_CLIENTS, 0, 30_000) as load:
        load.stdin.write("go\n")  # type: ignore[union-attr]
        load.stdin.flush()  # type: ignore[union-attr]
        time.sleep(2.0)  # all clients have sent something by then
        loaded = _p99s_ms(port)
    metrics = []
    for name, what in OTHERS.items():
        print(
            f"  {what}, 99th percentile of {PROBES}: idle {idle[name]:.1f} ms, while "
            f"{LOAD_CLIENTS} clients push pictures {loaded[name]:.1f} ms",
            flush=True,
        )
        goal = max(OTHERS_MS, 3 * idle[name])
        metrics.append(Metric(name, rounded(loaded[name]), "ms", f"<={rounded(goal)}"))
    return metrics


def _p99s_ms(port: int) -> dict[str, float]:
    seconds: dict[str, list[float]] = {HEALTH: [], TEXT: []}
    with Client(port) as client:
        for number in range(PROBES):
            text = text_request(str(CHECKPOINT), f"What is {number} plus {port}?", 1)
            for name, ask in (
                (HEALTH, lambda: client.get("/health")),
                (TEXT, lambda body=text: client.post(CHAT, body)),
            ):
                began = time.monotonic()
                ask()
                seconds[name].append(time.monotonic() - began)
            time.sleep(PROBE_SECONDS)
    return {name: quantiles(each, n=100)[98] * 1e3 for name, each in seconds.items()}


def measure_burst(port: int) -> Metric:
    body = picture_request(str(CHECKPOINT), jpeg(1024, 768, 77_777), "What?", 1)
    before = processor_runs(port)

    def ask(_: int) -> None:
        with Client(port) as client:
            client.post(CHAT, body)

    with ThreadPoolExecutor(BURST_SIZE) as threads:
        list(threads.map(ask, range(BURST_SIZE)))
    return Metric(BURST, processor_runs(port) - before, "runs", "==1")


def processor_runs(port: int) -> int:
    """How often an item was processed so far, in whatever process."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    values = re.findall(
        r"^foveal_preprocess_(?:seconds_count|fallbacks_total\{.*\}) (\S+)$", text, re.M
    )
    return int(sum(map(float, values)))


@contextmanager
def clients(
    port: int, count: int, pictures: int, first_seed: int
) -> Iterator[subprocess.Popen[str]]:
    """Clients in a process of their own, ready to start."""
    arguments = [str(port), str(CHECKPOINT), str(count), str(pictures), str(first_seed)]
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.preprocess.load", *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as load:
        try:
            if load.stdout is None or load.stdout.readline() != "ready\n":
                raise RuntimeError("the clients did not start")
            yield load
            if load.stdin is not None:
                load.stdin.close()
            if load.wait(120):
                raise RuntimeError("a request of the clients failed")
        finally:
            load.kill()


def _answer(load: subprocess.Popen[str], text: str) -> str:
    if load.stdin is None or load.stdout is None:
        raise RuntimeError("the clients have no pipes")
    load.stdin.write(text + "\n")
    load.stdin.flush()
    return load.stdout.readline() or "nan"
