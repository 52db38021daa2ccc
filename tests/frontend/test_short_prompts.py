from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from vllm.renderers.params import ChatParams

from frontend.short_prompts import SHORT, is_short
from tests.frontend.app import APP_MARKS, CHECKPOINT, App, body, running_app

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def messages(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


class WaitedFor(Exception):
    """Rendering gave up the event loop."""


def at_once(app: App, conversation: list[Any], params: ChatParams | None = None) -> Any:
    """What rendering a chat returns.

    Raises:
        WaitedFor: it takes more than one turn of the event loop.
    """
    rendering = app.renderer.render_chat_async([conversation], params or ChatParams())
    try:
        rendering.send(None)
    except StopIteration as done:
        return done.value
    rendering.close()
    raise WaitedFor


@pytest.fixture
async def app_of_own_templates() -> AsyncIterator[App]:
    async with running_app(CHECKPOINT, "--trust-request-chat-template") as app:
        yield app


class TestInTheApp:
    pytestmark = APP_MARKS

    async def test_a_short_chat_takes_one_turn_of_the_event_loop(self, app: App) -> None:
        conversation = messages("What is two plus two?")
        conversations, prompts = at_once(app, conversation)
        there = app.renderer.render_chat([conversation], ChatParams())
        assert conversations == there[0]
        ((ours, theirs),) = zip(prompts, there[1], strict=True)
        assert ours["prompt_token_ids"] == theirs["prompt_token_ids"]

    async def test_a_chat_with_a_tool_does_too(self, app: App) -> None:
        params = ChatParams(chat_template_kwargs={"tools": [TOOL]})
        conversation = messages("Look at it.")
        _, (prompt,) = at_once(app, conversation, params)
        _, (theirs,) = app.renderer.render_chat([conversation], params)
        assert prompt["prompt_token_ids"] == theirs["prompt_token_ids"]

    async def test_the_length_of_the_servers_template_does_not_matter(self, app: App) -> None:
        params = ChatParams(chat_template="{# " + "long " * SHORT + "#}{{ messages }}")
        _, (prompt,) = at_once(app, messages("Hello"), params)
        assert prompt["prompt_token_ids"]

    async def test_a_long_one_is_left_to_a_thread(self, app: App) -> None:
        with pytest.raises(WaitedFor):
            at_once(app, messages("a" * SHORT))

    async def test_and_comes_out_the_same(self, app: App) -> None:
        conversation = messages("word " * SHORT)
        _, (ours,) = await app.renderer.render_chat_async([conversation], ChatParams())
        _, (theirs,) = app.renderer.render_chat([conversation], ChatParams())
        assert ours["prompt_token_ids"] == theirs["prompt_token_ids"]

    async def test_a_template_that_refuses_is_answered_400(self, app: App) -> None:
        response = await app.http.post(
            "/v1/chat/completions/render",
            json=body((), {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}),
        )
        assert response.status_code == 400

    async def test_several_chats_are_rendered_side_by_side(self, app: App) -> None:
        texts = ("one", "two", "three")
        conversations = [messages(text) for text in texts]
        _, ours = await app.renderer.render_chat_async(conversations, ChatParams())
        _, theirs = app.renderer.render_chat(conversations, ChatParams())
        ids = [prompt["prompt_token_ids"] for prompt in ours]
        assert ids == [prompt["prompt_token_ids"] for prompt in theirs]
        assert len(set(map(tuple, ids))) == len(texts)

    async def test_templates_of_requests_are_rendered_in_a_thread(
        self, app_of_own_templates: App
    ) -> None:
        with pytest.raises(WaitedFor):
            at_once(app_of_own_templates, messages("Hello"))


def test_what_is_short() -> None:
    assert is_short("a" * 9, 10)
    assert not is_short("a" * 11, 10)
    assert is_short([{"role": "user", "content": "four"}], 25)
    assert not is_short([{"role": "user", "content": "four" * 5}], 25)
    assert not is_short([{"a" * 20: 1}], 10)


def test_many_small_values_are_not_short() -> None:
    assert not is_short([1] * 20, 10)
    assert not is_short([[]] * 20, 10)
    assert not is_short({"tools": [{"n": n} for n in range(20)]}, 10)
