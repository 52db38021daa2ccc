"""What is put into vLLM's renderer, in vLLM's own app."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.renderers.base import BaseRenderer

from frontend.segment_tokenizer import SHORTEST_TEXT, SegmentTokenizer
from tests.frontend.app import APP_MARKS, App

pytestmark = APP_MARKS


class Tokenizing:
    """Notes what is tokenized: as a whole by vLLM, or in segments by us."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, app: App) -> None:
        self.whole: list[str] = []
        self.segments: list[str] = []
        whole, in_segments = BaseRenderer._tokenize_prompt, SegmentTokenizer.encode

        def note_whole(renderer: Any, prompt: Any, params: Any) -> Any:
            self.whole.append(prompt["prompt"])
            return whole(renderer, prompt, params)

        def note_segments(tokenizer: SegmentTokenizer, text: str) -> list[int]:
            token_ids = in_segments(tokenizer, text)
            tokenizer_of_vllm = app.renderer.get_tokenizer()
            assert token_ids == tokenizer_of_vllm(text, add_special_tokens=False)["input_ids"]
            self.segments.append(text)
            return token_ids

        monkeypatch.setattr(BaseRenderer, "_tokenize_prompt", note_whole)
        monkeypatch.setattr(SegmentTokenizer, "encode", note_segments)


@pytest.fixture
def tokenizing(monkeypatch: pytest.MonkeyPatch, app: App) -> Tokenizing:
    return Tokenizing(monkeypatch, app)


def said(length: int) -> dict[str, Any]:
    return {"type": "text", "text": "word " * (length // 5)}


async def test_long_chats_are_tokenized_in_segments(app: App, tokenizing: Tokenizing) -> None:
    response = await app.render(said(SHORTEST_TEXT))
    assert response.status_code == 200, response.text
    assert len(tokenizing.segments) == 1


async def test_a_chat_that_is_too_long_is_refused_as_by_vllm(
    app: App, tokenizing: Tokenizing
) -> None:
    most = app.renderer.model_config.max_model_len
    response = await app.render(said(most + 100))
    assert response.status_code == 400
    assert "maximum context length" in response.text


async def test_text_that_is_to_get_special_tokens_is_vllms_business(
    app: App, tokenizing: Tokenizing
) -> None:
    await app.render(said(SHORTEST_TEXT), add_special_tokens=True)
    assert not tokenizing.segments
