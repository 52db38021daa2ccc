"""One request over HTTP: what came back, whole or not."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

SILENT_SECONDS = 60.0
"""A request that brings nothing for so long hangs."""


class Refused(Exception):
    """Nobody answered: the connection was refused, or ended before the response began."""


class Broken(Exception):
    """The connection ended in the middle of the response."""


@dataclass
class Answer:
    """What a request brought."""

    worker: str = ""
    texts: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    """Why each choice ended; empty for one that did not."""
    error: str = ""
    """What the server said instead."""
    completion_tokens: int = 0


async def ask(
    http: aiohttp.ClientSession,
    port: int,
    body: dict[str, Any],
    *,
    stream: bool,
    answer: Answer,
) -> None:
    """Send a chat request; what comes is put into ``answer`` as it comes.

    Raises:
        Refused, Broken, TimeoutError: it went wrong on the way.
    """
    choices = body.get("n", 1)
    answer.texts, answer.reasons = [""] * choices, [""] * choices
    if stream:
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    began = False
    try:
        async with http.post(url, json=body) as response:
            began = True
            answer.worker = response.headers.get("x-foveal-worker", "").split(",")[0]
            if response.status != 200:
                answer.error = f"{response.status}: {(await response.text())[:300]}"
            elif stream:
                await _read_stream(response, answer)
            else:
                _read_whole(await response.json(), answer)
    except TimeoutError:  # aiohttp's are, too
        raise TimeoutError(f"nothing for {SILENT_SECONDS:.0f} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise (Broken if began else Refused)(repr(error)) from error


async def _read_stream(response: aiohttp.ClientResponse, answer: Answer) -> None:
    done = False
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        if line.strip() == b"data: [DONE]":
            done = True
            continue
        event = json.loads(line[6:])
        if "error" in event:
            answer.error = str(event["error"].get("message", event["error"]))
            continue
        if event.get("usage"):
            answer.completion_tokens = event["usage"]["completion_tokens"]
        for choice in event["choices"]:
            index = choice["index"]
            answer.texts[index] += choice["delta"].get("content") or ""
            answer.reasons[index] = choice["finish_reason"] or answer.reasons[index]
    if not done:
        raise Broken("the stream ended too early")


def _read_whole(reply: dict[str, Any], answer: Answer) -> None:
    answer.completion_tokens = reply["usage"]["completion_tokens"]
    for choice in reply["choices"]:
        answer.texts[choice["index"]] = choice["message"]["content"] or ""
        answer.reasons[choice["index"]] = choice["finish_reason"]


def session() -> aiohttp.ClientSession:
    """One connection for each request, so that none is closed while it is being used."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(force_close=True, limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=SILENT_SECONDS),
    )


def now() -> float:
    return time.monotonic()
