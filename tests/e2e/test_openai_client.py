"""OpenAI's own client understands the answers, and they are plain vLLM's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from tests.e2e.answers import differences, joined
from tests.e2e.cases import CASES, CHAT, COMPLETIONS, MESSAGES, RESPONSES, Case
from tests.e2e.fleet import MODEL, Frontend

OPENAI_CASES = [case for case in CASES if case.path != MESSAGES]


@pytest.fixture(scope="module")
def client(frontend: Frontend) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{frontend.url}/v1", api_key="none") as client:
        yield client


def create(client: openai.OpenAI, case: Case) -> Any:
    """Make the request by the client's method, what it does not know in ``extra_body``."""
    method = {
        CHAT: client.chat.completions.create,
        COMPLETIONS: client.completions.create,
        RESPONSES: client.responses.create,
    }[case.path]
    known = inspect.signature(method).parameters
    extra = {name: value for name, value in case.body.items() if name not in known}
    return method(**{k: v for k, v in case.body.items() if k in known}, extra_body=extra)


def plain(answer: Any) -> Any:
    return answer.model_dump(mode="json", by_alias=True, warnings=False)


@pytest.mark.parametrize("case", OPENAI_CASES, ids=lambda case: case.name)
def test_the_client_reads_the_answer_that_vllm_gives(
    case: Case, client: openai.OpenAI, expected: Callable[[Case], Any]
) -> None:
    answer = create(client, case)
    ours = joined(plain(event) for event in answer) if case.streams else plain(answer)
    assert differences(ours, expected(case)) == []


def test_the_client_lists_the_model(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_the_client_sees_a_refusal_as_the_error_it_is(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(
            model="another", messages=[{"role": "user", "content": "Hi"}]
        )
