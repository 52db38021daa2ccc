"""Response headers say which worker answered and what it reused."""

from __future__ import annotations

import httpx
import pytest

from tests.e2e.cases import (
    BROKEN_PICTURE,
    CASES,
    CHAT,
    COMPLETIONS,
    FORMS,
    QUESTION,
    SAMPLED,
    STREAMED,
    chat_body,
    completion_body,
    user,
)
from tests.e2e.fleet import BLOCK_SIZE, MODEL, Frontend


def receipt(response: httpx.Response) -> dict[str, list[str]]:
    """The receipt's columns by name."""
    prefix = "x-foveal-"
    return {
        name.removeprefix(prefix): value.split(",")
        for name, value in response.headers.items()
        if name.startswith(prefix)
    }


@pytest.mark.parametrize("options", [{}, STREAMED], ids=["whole", "streamed"])
def test_an_answer_names_its_worker_blocks_and_transfer(
    frontend: Frontend, options: dict[str, object]
) -> None:
    columns = receipt(frontend.ask(CHAT, chat_body(QUESTION, **options)))
    assert columns.keys() == {
        "request-id", "worker", "overlap-blocks", "prompt-blocks", "embeddings", "transfer"
    }
    assert columns["worker"][0] in frontend.workers()
    assert columns["transfer"] == ["shm"]
    assert 0 <= int(columns["overlap-blocks"][0]) <= int(columns["prompt-blocks"][0])


def test_prompt_blocks_are_the_full_blocks_of_the_prompt(frontend: Frontend) -> None:
    response = frontend.ask(CHAT, chat_body(user(FORMS["coffee"], "What is it?")))
    tokens = response.json()["usage"]["prompt_tokens"]
    assert receipt(response)["prompt-blocks"] == [str(tokens // BLOCK_SIZE)]


def test_text_has_nothing_to_transfer(frontend: Frontend) -> None:
    assert receipt(frontend.ask(CHAT, chat_body(user("Hi"))))["transfer"] == ["none"]


@pytest.mark.parametrize("options", [{}, STREAMED], ids=["whole", "streamed"])
def test_several_answers_to_one_prompt_come_from_one_worker(
    frontend: Frontend, options: dict[str, object]
) -> None:
    body = chat_body(QUESTION, n=3, **SAMPLED, **options)
    columns = receipt(frontend.ask(CHAT, body))
    assert len(set(columns["worker"])) == 1
    assert {len(values) for values in columns.values()} == {3}


def test_each_of_several_prompts_has_its_own_column(frontend: Frontend) -> None:
    columns = receipt(frontend.ask(COMPLETIONS, completion_body(["One", "Two", "Three"])))
    assert {len(values) for values in columns.values()} == {3}
    assert set(columns["worker"]) <= frontend.workers().keys()


@pytest.mark.parametrize(
    "name",
    [
        "response", "message", "response_to_a_picture", "message_with_a_picture",
        "message_streamed",
        "response_streamed",
    ],
)
def test_other_apis_give_receipts_too(frontend: Frontend, name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    assert receipt(frontend.ask(case.path, case.body))["worker"][0] in frontend.workers()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        pytest.param(chat_body(user(BROKEN_PICTURE)), 400, id="broken_picture"),
        pytest.param(chat_body(user("Hi"), model="another"), 404, id="unknown_model"),
        pytest.param({"model": MODEL}, 400, id="no_messages"),
    ],
)
def test_a_refused_request_has_no_receipt(
    frontend: Frontend, body: dict[str, object], status: int
) -> None:
    response = frontend.http.post(CHAT, json=body)
    assert response.status_code == status
    assert receipt(response) == {}


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics", "/v1/fleet"])
def test_what_is_not_routed_has_no_receipt(frontend: Frontend, path: str) -> None:
    assert receipt(frontend.http.get(path)) == {}
