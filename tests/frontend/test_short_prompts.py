from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.renderers import hf
from vllm.renderers.params import ChatParams

from frontend.short_prompts import MOST_NAMES, SHORT, is_short, stay_on_the_loop
from tests.frontend.app import APP_MARKS, App

PLAIN = ChatParams(chat_template_kwargs={"tokenize": False})
"""As the server asks for it."""
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
    rendering = app.renderer.render_chat_async([conversation], params or PLAIN)
    try:
        rendering.send(None)
    except StopIteration as done:
        return done.value
    rendering.close()
    raise WaitedFor


class TestInTheApp:
    pytestmark = APP_MARKS

    async def test_a_short_chat_takes_one_turn_of_the_event_loop(self, app: App) -> None:
        conversation = messages("What is two plus two?")
        conversations, prompts = at_once(app, conversation)
        there = app.renderer.render_chat([conversation], PLAIN)
        assert conversations == there[0]
        ((ours, theirs),) = zip(prompts, there[1], strict=True)
        assert ours["prompt_token_ids"] == theirs["prompt_token_ids"]

    async def test_a_chat_with_a_tool_does_too(self, app: App) -> None:
        params = ChatParams(chat_template_kwargs={"tokenize": False, "tools": [TOOL]})
        conversation = messages("Look at it.")
        _, (prompt,) = at_once(app, conversation, params)
        _, (theirs,) = app.renderer.render_chat([conversation], params)
        assert prompt["prompt_token_ids"] == theirs["prompt_token_ids"]

    async def test_a_long_one_is_left_to_a_thread(self, app: App) -> None:
        with pytest.raises(WaitedFor):
            at_once(app, messages("a" * SHORT))

    async def test_and_comes_out_the_same(self, app: App) -> None:
        conversation = messages("word " * SHORT)
        _, (ours,) = await app.renderer.render_chat_async([conversation], PLAIN)
        _, (theirs,) = app.renderer.render_chat([conversation], PLAIN)
        assert ours["prompt_token_ids"] == theirs["prompt_token_ids"]

    async def test_a_template_that_refuses_is_answered_400(
        self, app: App, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*args: Any, **kwargs: Any) -> None:
            threads.append(threading.current_thread())
            raise VLLMValidationError("no such effort")

        threads: list[threading.Thread] = []
        monkeypatch.setattr(hf, "safe_apply_chat_template", refuse)
        response = await app.render()
        assert (response.status_code, threads) == (400, [threading.main_thread()])
        assert "no such effort" in response.text

    async def test_several_chats_are_rendered_side_by_side(self, app: App) -> None:
        texts = ("one", "two", "three")
        conversations = [messages(text) for text in texts]
        _, ours = await app.renderer.render_chat_async(conversations, PLAIN)
        _, theirs = app.renderer.render_chat(conversations, PLAIN)
        ids = [prompt["prompt_token_ids"] for prompt in ours]
        assert ids == [prompt["prompt_token_ids"] for prompt in theirs]
        assert len(set(map(tuple, ids))) == len(texts)

    @pytest.mark.parametrize(
        "kwargs",
        [
            {"chat_template": "{{ messages }}"},
            {"tokenize": True},
            {"times": 1_000_000},
            {"times": 1e9},
            {"words": "many " * SHORT},
            {f"a{number}": True for number in range(MOST_NAMES)},
            {"a" * SHORT: True},
        ],
        ids=["template", "tokens", "number", "float", "length", "names", "long name"],
    )
    async def test_what_a_request_could_make_long_is_left_to_a_thread(
        self, app: App, kwargs: dict[str, Any]
    ) -> None:
        params = ChatParams(chat_template_kwargs={"tokenize": False} | kwargs)
        with pytest.raises(WaitedFor):
            at_once(app, messages("Hello"), params)

    @pytest.mark.parametrize("name", ["servers", "function", "args", "template"])
    async def test_a_template_may_have_whatever_names(self, app: App, name: str) -> None:
        kwargs = {"chat_template_kwargs": {name: ["a", "b"]}}
        assert (await app.render(**kwargs)).status_code == 200

    async def test_a_request_of_many_prompts_does_not_keep_the_event_loop(
        self, app: App
    ) -> None:
        text = "word " * (SHORT // 5)
        prompts: list[Any] = [{"prompt": f"{number} {text}"[:SHORT]} for number in range(60)]
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        params = app.renderer.default_cmpl_tok_params
        tokenized = await app.renderer.tokenize_prompts_async(prompts, params)
        counting.cancel()
        expected = app.renderer.tokenize_prompts(prompts, params)
        assert [each["prompt_token_ids"] for each in tokenized] == [
            each["prompt_token_ids"] for each in expected
        ]
        assert turns > 5


class TestServersTemplate:
    """Of stay_on_the_loop alone, with as much of a renderer as it touches."""

    pytestmark = pytest.mark.anyio

    @pytest.mark.parametrize(
        ("servers", "asked", "here"),
        [("{{ 1 }}", "{{ 1 }}", True), ("{{ 1 }}", None, True), ("{{ 1 }}", "{{ 2 }}", False),
         (None, None, True), (None, "{{ 1 }}", False)],
    )
    async def test_only_the_servers_is_rendered_on_the_loop(
        self, servers: str | None, asked: str | None, here: bool,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        renderer: Any = object.__new__(hf.HfRenderer)
        renderer.tokenizer = SimpleNamespace(is_fast=True)
        renderer._tokenize_prompt_async = None

        async def in_thread(*args: Any, **kwargs: Any) -> str:
            return "in a thread"

        renderer._apply_chat_template_async = in_thread
        monkeypatch.setattr(hf, "safe_apply_chat_template", lambda *a, **k: "here")
        stay_on_the_loop(renderer, servers)
        rendered = renderer._apply_chat_template_async(
            None, None, messages("Hi"), chat_template=asked, tokenize=False
        )
        assert await rendered == ("here" if here else "in a thread")

    async def test_other_renderers_are_left_as_they_are(self) -> None:
        renderer = SimpleNamespace(tokenizer=SimpleNamespace(is_fast=True))
        stay_on_the_loop(renderer, None)
        assert vars(renderer).keys() == {"tokenizer"}


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
