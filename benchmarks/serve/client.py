"""The client: several chats at a time, each answer streamed and timed as it comes.

Of a system with several addresses every request takes the next: round-robin without a
proxy, which costs those who are measured nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.serve.workloads import ANSWER_TOKENS, CLIENTS, Chat, Message

REQUEST_SECONDS = 180.0


@dataclass
class Answer:
    """One request; times are in seconds from its start."""

    ttft: float | None = None
    """Until the first text."""
    seconds: float = 0.0
    """Until the end of the stream."""
    gaps: list[float] = field(default_factory=list)
    """Between pieces of text."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    error: str = ""


@dataclass
class Run:
    """One workload on one system."""

    seconds: float
    answers: list[Answer]


def run_chats(urls: Sequence[str], model: str, chats: Sequence[Chat]) -> Run:
    """Hold all chats, ``CLIENTS`` at a time; a chat ends with its first failure."""
    return asyncio.run(_run(urls, model, chats))


async def _run(urls: Sequence[str], model: str, chats: Sequence[Chat]) -> Run:
    waiting = iter(chats)
    next_url = itertools.cycle(urls)
    answers: list[Answer] = []
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        began = time.perf_counter()
        await asyncio.gather(
            *(_hold(session, next_url, model, waiting, answers) for _ in range(CLIENTS))
        )
        return Run(time.perf_counter() - began, answers)


async def _hold(
    session: aiohttp.ClientSession,
    urls: Iterator[str],
    model: str,
    waiting: Iterator[Chat],
    answers: list[Answer],
) -> None:
    for chat in waiting:
        for messages in chat.turns:
            answer = await _ask(session, next(urls), model, messages)
            answers.append(answer)
            if answer.error:
                break


async def _ask(
    session: aiohttp.ClientSession, url: str, model: str, messages: Sequence[Message]
) -> Answer:
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = Answer()
    began = last = time.perf_counter()
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            if response.status != 200:
                answer.error = f"{response.status} {(await response.text())[:200]}"
                return answer
            async for line in response.content:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    break
                event = json.loads(data)
                _note_usage(answer, event.get("usage"))
                if _has_text(event):
                    now = time.perf_counter()
                    if answer.ttft is None:
                        answer.ttft = now - began
                    else:
                        answer.gaps.append(now - last)
                    last = now
                elif "error" in event:
                    answer.error = str(event["error"])[:200]
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        answer.error = repr(error)
    answer.seconds = time.perf_counter() - began
    if answer.ttft is None and not answer.error:
        answer.error = "an answer without text"
    return answer


def _has_text(event: dict[str, Any]) -> bool:
    return any(choice.get("delta", {}).get("content") for choice in event.get("choices", ()))


def _note_usage(answer: Answer, usage: dict[str, Any] | None) -> None:
    if not usage:
        return
    answer.prompt_tokens = usage.get("prompt_tokens") or 0
    answer.answer_tokens = usage.get("completion_tokens") or 0
    details = usage.get("prompt_tokens_details") or {}
    answer.cached_tokens = details.get("cached_tokens") or 0
