"""Whatever is asked, the answer is plain vLLM's: tokens, log-probabilities and all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.answers import answer_of, differences
from tests.e2e.cases import (
    BROKEN_PICTURE,
    CASES,
    CHAT,
    COMPLETIONS,
    FORMS,
    Case,
    chat_body,
    says,
    user,
)
from tests.e2e.fleet import MODEL, Frontend, Server

TOO_LONG = "All work and no play. " * 1000


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_answer_is_the_one_that_vllm_gives(
    case: Case, frontend: Frontend, expected: Callable[[Case], Any]
) -> None:
    ours = answer_of(frontend.ask(case.path, case.body))
    assert differences(ours, expected(case)) == []


def test_a_uuid_stands_for_the_picture_sent_with_it(frontend: Frontend, vllm: Server) -> None:
    shown = user({**FORMS["cat"], "uuid": "my-cat"}, "What is it?")
    named = user({"type": "image_url", "image_url": None, "uuid": "my-cat"}, "What is it?")
    answers = [
        answer_of(server.ask(CHAT, chat_body(message)))
        for server in (frontend, vllm)
        for message in (shown, named)
    ]
    for answer in answers[1:]:
        assert differences(answers[0], answer) == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param("/tokenize", {"prompt": "Hello there"}, id="text"),
        pytest.param("/tokenize", {"messages": [says("user", "Hello")]}, id="chat"),
        pytest.param("/tokenize", {"messages": [user(FORMS["png"], "What?")]}, id="picture"),
        pytest.param("/detokenize", {"tokens": [40, 68, 75, 75, 78]}, id="detokenize"),
    ],
)
def test_tokenizing_gives_what_vllm_gives(
    path: str, body: dict[str, Any], frontend: Frontend, vllm: Server
) -> None:
    ours, theirs = (
        server.ask(path, {"model": MODEL, **body}).json() for server in (frontend, vllm)
    )
    assert differences(ours, theirs) == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param(CHAT, chat_body(user("Hi"), model="another"), id="unknown_model"),
        pytest.param(CHAT, chat_body(user(TOO_LONG)), id="too_long"),
        pytest.param(CHAT, chat_body(user("Hi"), max_tokens=9000), id="asks_too_much"),
        pytest.param(CHAT, chat_body(), id="no_messages"),
        pytest.param(CHAT, chat_body(user("Hi"), temperature=-1), id="bad_temperature"),
        pytest.param(
            CHAT,
            chat_body(user(BROKEN_PICTURE)),
            id="broken_picture",
        ),
        pytest.param(
            CHAT,
            chat_body(user({"type": "image_url", "image_url": None, "uuid": "never seen"})),
            id="unknown_uuid",
        ),
        pytest.param(
            CHAT,
            chat_body(user("Hi"), structured_outputs={"regex": "("}),
            id="bad_regex",
        ),
        pytest.param(COMPLETIONS, {"model": MODEL, "prompt": []}, id="no_prompt"),
        pytest.param("/v1/nowhere", {}, id="no_such_path"),
    ],
)
def test_what_vllm_refuses_is_refused_in_the_same_words(
    path: str, body: dict[str, Any], frontend: Frontend, vllm: Server
) -> None:
    ours, theirs = (server.http.post(path, json=body) for server in (frontend, vllm))
    assert ours.status_code == theirs.status_code >= 400
    assert ours.json() == theirs.json()


def test_both_serve_the_same_model(frontend: Frontend, vllm: Server) -> None:
    ours, theirs = (s.http.get("/v1/models").json()["data"] for s in (frontend, vllm))
    for model in (*ours, *theirs):
        del model["permission"]
    assert differences(ours, theirs) == []


def test_a_frontend_has_every_path_that_vllm_has(frontend: Frontend, vllm: Server) -> None:
    ours, theirs = (set(s.http.get("/openapi.json").json()["paths"]) for s in (frontend, vllm))
    assert ours - theirs == {"/v1/fleet"}
    assert theirs - ours == set()


def test_a_frontend_with_workers_is_healthy(frontend: Frontend) -> None:
    assert frontend.http.get("/health").status_code == 200


def test_metrics_have_the_names_that_vllm_gives_them(frontend: Frontend, vllm: Server) -> None:
    ours, theirs = (
        {
            line.split()[2]
            for line in server.http.get("/metrics").text.splitlines()
            if line.startswith("# TYPE vllm:")
        }
        for server in (frontend, vllm)
    )
    assert theirs - ours == set()
