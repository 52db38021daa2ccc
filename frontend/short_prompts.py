"""Short prompts are rendered and tokenized in one go, without giving up the event loop.

vLLM has both done by a thread, and makes a task of each step. For a short chat a step takes
a millisecond or less, but twice the thread must get hold of Python's interpreter lock, and a
dozen times the request waits for its next turn of the event loop: while others push
pictures, that was most of what a chat of text only waited for. A chat template that a
request brings along is rendered in a thread: it could take for ever. So is whatever has
numbers for the template, or wants it tokenized there: both can make much of little.

vLLM names relied on: HfRenderer, whose tokenizer may be called from several threads;
BaseRenderer._tokenize_prompt(prompt, params) with the text under "prompt", and
_tokenize_prompt_async; _apply_chat_template_async(model_config, tokenizer, conversation,
**kwargs) around renderers.hf.safe_apply_chat_template, awaited by _render_with_timeout, with
what the request says of the template in its keyword arguments; asyncio as renderers.base
knows it, whose gather awaits the prompts of a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from vllm.renderers import base, hf

from frontend.loop_turn import turn

SHORT = 2048
"""Characters. Fast tokenizers take a millisecond or two for so many."""

MOST_NAMES = 32
"""That a request has for the template; each is looked up in it. vLLM's own are ten."""


def stay_on_the_loop(renderer: Any, template: str | None) -> None:
    """From now on let ``renderer`` do what is short at once.

    ``template``: the server's chat template; None for the model's own.
    """
    if not isinstance(renderer, hf.HfRenderer) or not getattr(
        renderer.tokenizer, "is_fast", False
    ):
        return
    tokenize: Callable[..., Any] = renderer._tokenize_prompt
    tokenize_in_thread: Callable[..., Awaitable[Any]] = renderer._tokenize_prompt_async
    render_in_thread: Callable[..., Awaitable[Any]] = renderer._apply_chat_template_async
    wait_in_time: Callable[..., Awaitable[Any]] = renderer._render_with_timeout

    def tokenize_where_fit(prompt: Mapping[str, Any], params: Any) -> Awaitable[Any]:
        if len(prompt["prompt"]) > SHORT or not turn.has_time():
            return tokenize_in_thread(prompt, params)
        return _at_once(tokenize, prompt, params)

    def render_where_fit(
        model_config: Any, tokenizer: Any, conversation: Any, **kwargs: Any
    ) -> Awaitable[Any]:
        if not _is_quick(conversation, template, **kwargs) or not turn.has_time():
            return render_in_thread(model_config, tokenizer, conversation, **kwargs)
        render = hf.safe_apply_chat_template
        return _at_once(render, model_config, tokenizer, conversation, **kwargs)

    async def wait(rendering: Awaitable[Any]) -> Any:
        if isinstance(rendering, asyncio.Future) and rendering.done():
            return rendering.result()
        return await wait_in_time(rendering)

    base.__dict__["asyncio"] = _Asyncio()
    renderer._tokenize_prompt_async = tokenize_where_fit
    renderer._apply_chat_template_async = render_where_fit
    renderer._render_with_timeout = wait  # type: ignore[method-assign]


def _is_quick(
    conversation: Any,
    servers: str | None,
    /,
    *,
    chat_template: str | None = None,
    tokenize: bool = True,
    **kwargs: Any,
) -> bool:
    """Whether the template, if it is the server's, takes little time."""
    if chat_template not in (None, servers) or tokenize:
        return False
    if any(type(value) in (int, float) for value in kwargs.values()):
        return False  # how often to do something, perhaps
    return len(kwargs) <= MOST_NAMES and is_short((conversation, kwargs))


def is_short(value: Any, limit: int = SHORT) -> bool:
    """Whether plain data has at most ``limit`` characters, and as many other values."""
    left = limit
    waiting = [value]
    while waiting and left >= 0:
        value = waiting.pop()
        if isinstance(value, str):
            left -= len(value)
        elif isinstance(value, Mapping):
            waiting += value.keys()
            waiting += value.values()
        elif isinstance(value, Iterable):
            waiting += value
        left -= 1
    return left >= 0


def _at_once(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Awaitable[Any]:
    future = asyncio.get_running_loop().create_future()
    try:
        turn.spend()
        future.set_result(function(*args, **kwargs))
    except Exception as error:  # raised where the future is awaited
        future.set_exception(error)
    return future


class _Asyncio:
    """asyncio, except that what is gathered alone is awaited as it is."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    @staticmethod
    async def gather(*awaitables: Awaitable[Any], **options: Any) -> list[Any]:
        if len(awaitables) == 1 and not options:
            return [await awaitables[0]]
        return await asyncio.gather(*awaitables, **options)
