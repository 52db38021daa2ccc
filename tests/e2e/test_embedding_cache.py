"""An image is encoded once per host, whichever worker it is asked of.

The session's workers share their encoder outputs; plain vLLM beside them does not. What
the engines encode is noted in their model runners (``processor_trap``).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.e2e.answers import answer_of, differences
from tests.e2e.cases import CHAT, chat_body, shown, user
from tests.e2e.fleet import Frontend, Server
from tests.e2e.pictures import pattern
from tests.e2e.processes import wait_until


def encoder_runs(trap: Path) -> list[tuple[int, str]]:
    """Process and identifier of each output that an engine has computed so far."""
    log = trap / "encoder-runs"
    lines = log.read_text().splitlines() if log.exists() else []
    return [(int(pid), identifier) for pid, identifier in map(str.split, lines)]


def encode(frontend: Frontend, *pictures: dict[str, object]) -> None:
    """Have each picture encoded somewhere, and wait until the frontend knows it."""
    before = frontend.shared_embeddings()
    for picture in pictures:
        frontend.ask(CHAT, chat_body(user(picture, "Look at this.")))
    wanted = before + len(pictures)
    wait_until(lambda: frontend.shared_embeddings() >= wanted, 10.0, "news of the outputs")


def test_an_image_asked_of_both_workers_is_encoded_once(
    frontend: Frontend, vllm: Server, trap_directory: Path
) -> None:
    picture = shown(pattern(500, 500, 8000))
    before = encoder_runs(trap_directory)
    encode(frontend, picture)
    # No block of one is of use to another, so all are computed; at once, on both workers.
    bodies = [
        chat_body(user(picture, f"Question {number}"), cache_salt=f"salt {number}")
        for number in range(8)
    ]
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(lambda body: frontend.ask(CHAT, body), bodies))
    served = {answer.headers["x-foveal-worker"] for answer in answers}
    assert served == frontend.workers().keys()
    assert {answer.headers["x-foveal-embeddings"] for answer in answers} == {"1/1"}
    assert {answer.headers["x-foveal-overlap-blocks"] for answer in answers} == {"0"}
    [(_, identifier)] = encoder_runs(trap_directory)[len(before) :]
    assert identifier.startswith("image-")
    for body, answer in zip(bodies, answers, strict=True):
        assert differences(answer_of(answer), answer_of(vllm.ask(CHAT, body))) == []


def test_the_receipt_tells_what_is_cached_what_is_encoded_and_what_is_neither(
    frontend: Frontend, vllm: Server
) -> None:
    known, alike, new = (shown(pattern(300, 260, 8100 + number)) for number in range(3))
    encode(frontend, known, alike)
    body = chat_body(user(known, "One", alike, "two", new, "three"), cache_salt="mixed")
    first = frontend.ask(CHAT, body)
    assert first.headers["x-foveal-embeddings"] == "2/3"
    frontend.settle()
    again = frontend.ask(CHAT, body)  # all in cached blocks: no output is needed
    assert again.headers["x-foveal-embeddings"] == "0/0"
    for answer in (first, again):
        assert differences(answer_of(answer), answer_of(vllm.ask(CHAT, body))) == []


def test_an_image_larger_than_a_step_is_loaded_like_any_other(
    frontend: Frontend, vllm: Server
) -> None:
    """Prefill in chunks: the output is needed in several steps."""
    large = shown(pattern(1000, 990, 8200))
    encode(frontend, large)
    texts = ["word " * 200, "another " * 200]
    bodies = [
        chat_body(user(text, large, text), cache_salt=f"chunks {number}")
        for number, text in enumerate(texts)
    ]
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(lambda body: frontend.ask(CHAT, body), bodies))
    for body, answer in zip(bodies, answers, strict=True):
        assert answer.headers["x-foveal-embeddings"] == "1/1"
        assert differences(answer_of(answer), answer_of(vllm.ask(CHAT, body))) == []


def test_the_fleet_counts_runs_and_loads(frontend: Frontend) -> None:
    frontend.settle()
    workers = frontend.workers().values()
    assert sum(worker["encoder_runs"] for worker in workers) > 0
    assert sum(worker["embedding_loads"] for worker in workers) > 0
