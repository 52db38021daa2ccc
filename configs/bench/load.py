"""Sends a load and times each answer."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

PATH = "/v1/chat/completions"


@dataclass
class Answer:
    """One request and what came of it; times are seconds from when it was sent."""

    error: str = ""
    first_token: float = 0.0
    tokens_at: list[float] = field(default_factory=list)
    """When each piece of the text came."""
    end: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    worker: str = ""
    transfer: str = ""
    status: int = 0


class NoServer(Exception):
    """Nothing that serves models answers there."""


async def first_model(url: str, api_key: str) -> str:
    """The name of the first model that the server has.

    Raises:
        NoServer: it does not say.
    """
    try:
        async with (
            aiohttp.ClientSession(headers=_headers(api_key)) as session,
            session.get(f"{url}/v1/models", timeout=aiohttp.ClientTimeout(10)) as response,
        ):
            response.raise_for_status()
            return str((await response.json())["data"][0]["id"])
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
        raise NoServer(f"no server with a model answers at {url}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientResponseError):
        hint = ": give the key with --api-key" if error.status in (401, 403) else ""
        return f"{error.status} {error.message}{hint}"
    if isinstance(error, aiohttp.InvalidURL):
        return "that is no address"
    if isinstance(error, OSError) and error.strerror:
        # aiohttp puts the address into it once more.
        return os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
    return str(error) or "no answer within 10 s"


async def send_load(
    url: str,
    bodies: Iterable[Mapping[str, Any]],
    concurrency: int,
    timeout: float,
    api_key: str = "",
    on_answer: Callable[[Answer], None] = lambda answer: None,
) -> tuple[list[Answer], float]:
    """Keep ``concurrency`` requests under way until all are answered.

    Returns the answers in the order in which they ended, and the seconds it all took.
    An answer that fails is one with an error.
    """
    answers: list[Answer] = []
    waiting = iter([json.dumps(body).encode() for body in bodies])
    connector = aiohttp.TCPConnector(limit=concurrency)
    headers = {**_headers(api_key), "Content-Type": "application/json"}
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:

        async def one_client() -> None:
            for body in waiting:
                answers.append(await _ask(session, url, body, timeout))
                on_answer(answers[-1])

        began = time.perf_counter()
        async with asyncio.TaskGroup() as clients:
            for _ in range(concurrency):
                clients.create_task(one_client())
        return answers, time.perf_counter() - began


async def _ask(
    session: aiohttp.ClientSession, url: str, body: bytes, timeout: float
) -> Answer:
    answer = Answer()
    began = time.perf_counter()
    try:
        async with session.post(
            url + PATH, data=body, timeout=aiohttp.ClientTimeout(timeout)
        ) as response:
            answer.status = response.status
            answer.worker = response.headers.get("x-foveal-worker", "")
            answer.transfer = response.headers.get("x-foveal-transfer", "")
            if response.status != 200:
                answer.error = f"{response.status}: {(await response.text())[:200]}"
                return answer
            async for line in response.content:
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    _note(answer, json.loads(line[6:]), time.perf_counter() - began)
    except TimeoutError:
        answer.error = f"no whole answer within {timeout:.0f} s"
    except (aiohttp.ClientError, OSError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.end = time.perf_counter() - began
    if not answer.error and not answer.tokens_at:
        answer.error = "an answer without text"
    return answer


def _note(answer: Answer, event: dict[str, Any], at: float) -> None:
    if "error" in event:
        answer.error = str(event["error"])[:200]
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        if delta.get("content") or delta.get("reasoning") or delta.get("tool_calls"):
            answer.first_token = answer.first_token or at
            answer.tokens_at.append(at)
    if usage := event.get("usage"):
        answer.prompt_tokens = usage.get("prompt_tokens") or 0
        answer.completion_tokens = usage.get("completion_tokens") or 0
        details = usage.get("prompt_tokens_details") or {}
        answer.cached_tokens = details.get("cached_tokens") or 0


def _headers(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}
