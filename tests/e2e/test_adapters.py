"""LoRA adapters: at start and at run time, for all workers, those that come later too."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.answers import answer_of, differences
from tests.e2e.cases import CHAT, chat_body, shown, user
from tests.e2e.fleet import BLOCK_SIZE, MODEL, Deployment, Frontend, Server
from tests.e2e.pictures import pattern
from tests.e2e.processes import wait_until
from tests.e2e.reuse import ask_and_settle
from tests.families.adapters import write_adapter

LORA = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2", "--max-cpu-loras", "4")
RUNTIME = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"

pytestmark = pytest.mark.usefixtures("no_session_fleet")


@dataclass(frozen=True)
class Adapted:
    deployment: Deployment
    frontend: Frontend
    vllm: Server
    adapters: dict[str, Path]


@pytest.fixture(scope="module")
def adapted(
    no_session_fleet: None, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Adapted]:
    """One worker, a frontend and plain vLLM, all started with one adapter of two."""
    directory = tmp_path_factory.mktemp("adapters")
    adapters = {
        name: write_adapter(directory / name, seed)
        for seed, name in enumerate(("poet", "clerk"))
    }
    static = ("--lora-modules", f"poet={adapters['poet']}")
    deployment = Deployment(checkpoint, tmp_path_factory.mktemp("logs"))
    try:
        deployment.start_worker(*LORA)
        vllm = deployment.start_vllm(*LORA, *static, env=RUNTIME)
        frontend = deployment.start_frontend(*LORA, *static, env=RUNTIME)
        deployment.await_ready([frontend, vllm], workers=1)
        for server in (frontend, vllm):
            load(server, "clerk", adapters["clerk"])
        yield Adapted(deployment, frontend, vllm, adapters)
    finally:
        deployment.end()


def load(server: Server, name: str, path: Path) -> None:
    body = {"lora_name": name, "lora_path": str(path)}
    assert server.http.post(LOAD, json=body).status_code == 200


def question(model: str, seed: int, **options: Any) -> dict[str, Any]:
    picture = shown(pattern(200, 120, 7000 + seed))
    return chat_body(user(picture, "What is it? " * 6), model=model, **options)


def test_answers_with_each_adapter_are_those_of_plain_vllm(adapted: Adapted) -> None:
    answers = {}
    for model in (MODEL, "poet", "clerk"):
        ours, theirs = (
            answer_of(server.ask(CHAT, question(model, 1)))
            for server in (adapted.frontend, adapted.vllm)
        )
        assert differences(ours, theirs) == []
        answers[model] = ours["choices"][0]["token_ids"]
    assert len({tuple(tokens) for tokens in answers.values()}) == 3


def test_an_image_is_processed_once_and_cached_for_each_adapter(adapted: Adapted) -> None:
    frontend = adapted.frontend
    entries = frontend.fleet()["arena"]["entries"]
    for model in (MODEL, "poet", "clerk"):
        first = ask_and_settle(frontend, question(model, 2))
        # The blocks of text before the picture may be known from earlier questions.
        assert first.overlap_tokens == first.cached_tokens <= BLOCK_SIZE
        again = ask_and_settle(frontend, question(model, 2))
        assert again.overlap_tokens == again.cached_tokens == again.reusable_tokens
        assert again.cached_tokens > BLOCK_SIZE
    assert frontend.fleet()["arena"]["entries"] == entries + 1


def test_a_worker_that_comes_later_has_all_adapters(adapted: Adapted) -> None:
    frontend, [first] = adapted.frontend, adapted.frontend.workers()
    late = adapted.deployment.start_worker(*LORA, name="late")
    wait_until(lambda: frontend.has_workers(2), 400.0, "a second worker")
    bodies = [
        question(model, seed) for seed in range(10, 16) for model in ("poet", "clerk")
    ]
    # All at once, so that one worker alone is not the best for each.
    with ThreadPoolExecutor(len(bodies)) as threads:
        responses = list(threads.map(lambda body: frontend.ask(CHAT, body), bodies))
    for body, response in zip(bodies, responses, strict=True):
        expected = answer_of(adapted.vllm.ask(CHAT, body))
        assert differences(answer_of(response), expected) == []
    served = {response.headers["x-foveal-worker"] for response in responses}
    assert served > {first}
    assert late.exit_status is None


def test_an_adapter_that_was_taken_away_is_not_there(adapted: Adapted) -> None:
    taken = adapted.frontend.http.post(UNLOAD, json={"lora_name": "clerk"})
    assert taken.status_code == 200
    gone = adapted.frontend.http.post(CHAT, json=question("clerk", 3))
    assert gone.status_code == 404
    assert adapted.frontend.ask(CHAT, question("poet", 3)).status_code == 200
