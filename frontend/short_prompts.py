"""Short prompts are rendered and tokenized in one go, without giving up the event loop.

vLLM has both done by a thread, and makes a task of each step. For a short chat a step takes
a fraction of a millisecond, but twice the thread must get hold of Python's interpreter
lock, and a dozen times the request waits for its next turn of the event loop: while others
push pictures, that was most of what a chat of text only waited for. Where a request may
bring a chat template of its own, rendering stays in a thread: it could take for ever.

vLLM names relied on: BaseRenderer._tokenize_prompt(prompt, params) with the text under
"prompt", and _tokenize_prompt_async; HfRenderer._apply_chat_template_async(model_config,
tokenizer, conversation, **kwargs) around renderers.hf.safe_apply_chat_template, awaited by
_render_with_timeout; asyncio as renderers.base knows it, whose gather awaits the prompts of
a request. A tokenizer is made safe to call from one thread more than renderers have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from vllm.renderers import base, hf

SHORT = 4096
"""Characters. Fast tokenizers take about a millisecond for so many."""


def stay_on_the_loop(renderer: Any, *, own_templates: bool) -> None:
    """From now on let ``renderer`` do what is short at once.

    ``own_templates``: requests may bring their chat template.
    """
    if not getattr(renderer.tokenizer, "is_fast", False):
        return
    tokenize: Callable[..., Any] = renderer._tokenize_prompt
    tokenize_in_thread: Callable[..., Awaitable[Any]] = renderer._tokenize_prompt_async

    def tokenize_where_fit(prompt: Mapping[str, Any], params: Any) -> Awaitable[Any]:
        if len(prompt["prompt"]) > SHORT:
            return tokenize_in_thread(prompt, params)
        return _at_once(tokenize, prompt, params)

    renderer._tokenize_prompt_async = tokenize_where_fit
    base.__dict__["asyncio"] = _Asyncio()
    if own_templates or not isinstance(renderer, hf.HfRenderer):
        return
    render_in_thread: Callable[..., Awaitable[Any]] = renderer._apply_chat_template_async
    wait_in_time: Callable[..., Awaitable[Any]] = renderer._render_with_timeout

    def render_where_fit(
        model_config: Any, tokenizer: Any, conversation: Any, **kwargs: Any
    ) -> Awaitable[Any]:
        sent = kwargs.keys() - {"chat_template"}  # the server's own, however long
        if not is_short((conversation, [kwargs[name] for name in sent])):
            return render_in_thread(model_config, tokenizer, conversation, **kwargs)
        render = hf.safe_apply_chat_template
        return _at_once(render, model_config, tokenizer, conversation, **kwargs)

    async def wait(rendering: Awaitable[Any]) -> Any:
        if isinstance(rendering, asyncio.Future) and rendering.done():
            return rendering.result()
        return await wait_in_time(rendering)

    renderer._apply_chat_template_async = render_where_fit
    renderer._render_with_timeout = wait  # type: ignore[method-assign]


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


def _at_once(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Awaitable[Any]:
    future = asyncio.get_running_loop().create_future()
    try:
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
