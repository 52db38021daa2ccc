"""The client reads a stream as it comes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from aiohttp import web

from benchmarks.serve.client import run_chats
from benchmarks.serve.workloads import Chat
from tests.e2e.processes import free_port

CHAT = Chat(tuple(({"role": "user", "content": f"turn {n}"},) for n in range(2)))


class Peer:
    """A server that answers as OpenAI's do."""

    def __init__(self) -> None:
        self.asked: list[dict[str, object]] = []
        self.fails = False

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        if self.fails:
            return web.json_response({"error": "no"}, status=500)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for text in ("", "a", "b", "c"):
            event = {"choices": [{"delta": {"role": "assistant", "content": text}}]}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        usage = {
            "prompt_tokens": 50, "completion_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 32},
        }
        told = json.dumps({"choices": [], "usage": usage})
        await response.write(f"data: {told}\n\ndata: [DONE]\n\n".encode())
        return response

    @contextmanager
    def running(self) -> Iterator[str]:
        port = free_port()
        loop = asyncio.new_event_loop()
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.answer)
        runner = web.AppRunner(app)

        async def start() -> None:
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", port).start()

        loop.run_until_complete(start())
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(20)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(20)
            loop.close()


def test_answers_are_timed_and_their_usage_noted() -> None:
    peer = Peer()
    with peer.running() as url:
        run = run_chats([url], "demo", [CHAT])
    assert [body["messages"] for body in peer.asked] == [list(turn) for turn in CHAT.turns]
    assert all(body["stream"] and body["model"] == "demo" for body in peer.asked)
    assert len(run.answers) == 2
    for answer in run.answers:
        assert answer.error == ""
        assert answer.ttft is not None and 0 < answer.ttft <= answer.seconds <= run.seconds
        assert len(answer.gaps) == 2
        assert (answer.prompt_tokens, answer.cached_tokens) == (50, 32)
        assert answer.answer_tokens == 3


def test_several_addresses_take_turns() -> None:
    first, second = Peer(), Peer()
    with first.running() as one, second.running() as two:
        run_chats([one, two], "demo", [CHAT, CHAT])
    assert (len(first.asked), len(second.asked)) == (2, 2)


def test_a_chat_ends_with_its_first_failure() -> None:
    peer = Peer()
    peer.fails = True
    with peer.running() as url:
        run = run_chats([url], "demo", [CHAT])
    (answer,) = run.answers
    assert answer.error.startswith("500")


@pytest.mark.parametrize("urls", [["http://127.0.0.1:9"]])
def test_nobody_there_is_an_error_of_each_request(urls: list[str]) -> None:
    run = run_chats(urls, "demo", [CHAT])
    assert [bool(answer.error) for answer in run.answers] == [True]
