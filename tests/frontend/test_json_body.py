"""Bodies mean what Python's parser says they mean, whichever parser reads them."""

from __future__ import annotations

import json
from typing import Any, cast

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.types import Message

from frontend import json_body
from frontend.json_body import json_of, parse
from frontend.vllm_seams import our_app

pytestmark = pytest.mark.anyio

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20
)


def outcome(parser: Any, body: bytes) -> Any:
    """What a parser makes of a body; ``repr`` tells 1 from 1.0 and finds NaN equal."""
    try:
        return repr(parser(body))
    except (ValueError, RecursionError) as error:
        return type(error), str(error)


@given(VALUES, st.booleans(), st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32-le"]))
def test_what_python_writes_is_read_as_python_reads_it(
    value: Any, ascii_only: bool, encoding: str
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    body = text.encode(encoding, "surrogatepass")
    assert outcome(parse, body) == outcome(json.loads, body)


@given(
    st.binary()
    | st.text('{}[]",:0123456789.eE+-truefalsnN \\u/d8\t', max_size=40).map(str.encode)
)
@example(b"1E400")
@example(b"-0")
@example(b'{"a": 1, "a": 2}')
@example(b'"\\ud800"')
@example(b'"\\ud83d\\ude00"')
@example(b'"a\tb"')
@example(b"9007199254740993.0")
@example(b"123456789012345678901234567890")
@example(b"1" * 5000)
@example(b"")
@example(b"[" * 100_000)
@example(b'{"messages": [}')
def test_what_clients_write_is_read_or_refused_as_python_does(body: bytes) -> None:
    assert outcome(parse, body) == outcome(json.loads, body)


def test_a_body_with_an_image_is_not_parsed_by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.dumps({"messages": [{"content": [{"url": "data:," + "A" * 100_000}]}]})
    expected = json.loads(body)

    def refuse(*_: Any) -> None:
        raise AssertionError("parsed by the slower parser")

    monkeypatch.setattr(json, "loads", refuse)
    assert parse(body.encode()) == expected


async def test_a_request_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []

    def parse_and_note(body: bytes) -> Any:
        parsed.append(body)
        return parse(body)

    async def receive() -> Message:
        return {"type": "http.request", "body": b'{"a": 1}', "more_body": False}

    monkeypatch.setattr(json_body, "parse", parse_and_note)
    request = Request({"type": "http", "method": "POST", "headers": []}, receive)
    assert await json_of(request) == {"a": 1}
    assert await json_of(request) == {"a": 1}
    assert parsed == [b'{"a": 1}']


@pytest.mark.parametrize("body", [b'{"a": [1, 2.5, "x"]}', b'{"a": NaN}', b'{"a": ', b"\xff"])
async def test_fastapi_answers_as_with_its_own_parser(
    body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[bytes] = []

    def parse_and_note(body: bytes) -> Any:
        parsed.append(body)
        return parse(body)

    monkeypatch.setattr(json_body, "parse", parse_and_note)
    theirs = await answer(body)
    assert not parsed
    with our_app(APIRouter(), cast("Any", None), cast("Any", None)):
        ours = await answer(body)
    assert parsed == [body]
    assert (ours.status_code, ours.content) == (theirs.status_code, theirs.content)
    assert Request.json is not json_of


async def answer(body: bytes) -> httpx.Response:
    """Of an app that says what it has read."""
    app = FastAPI()

    @app.post("/")
    async def say(read: dict[str, Any]) -> str:
        return repr(read)

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
        headers = {"content-type": "application/json"}
        return await client.post("/", content=body, headers=headers)
