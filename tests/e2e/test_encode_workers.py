"""A worker that only encodes: it helps while it lives, and nobody needs it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.answers import answer_of, differences
from tests.e2e.cases import CHAT, chat_body, shown, user
from tests.e2e.fleet import Deployment, Frontend
from tests.e2e.pictures import pattern
from tests.e2e.processes import Process, wait_until

pytestmark = pytest.mark.usefixtures("no_session_fleet")

SHARED = ("--multimodal-embedding-cache-capacity-gb", "0.25")


class EncodeFleet:
    """One worker of either role, and a frontend."""

    def __init__(self, checkpoint: Path, logs: Path) -> None:
        self.deployment = Deployment(checkpoint, logs, "encode")
        self.deployment.start_worker(*SHARED)
        self.encoder: Process = self.deployment.start_worker(
            *SHARED, "--role", "encode", name="encoder"
        )
        # For POST /reset_encoder_cache and the like.
        self.frontend: Frontend = self.deployment.start_frontend(
            "--mm-preprocess-workers", "0", env={"VLLM_SERVER_DEV_MODE": "1"}
        )
        try:
            self.deployment.await_ready([self.frontend], workers=2)
        except BaseException:
            print(self.deployment.last_lines())
            self.deployment.end()
            raise

    def runs(self) -> dict[str, int]:
        """Encoder runs by role, as far as workers have told."""
        workers = self.frontend.workers().values()
        return {worker["facts"]["role"]: worker["encoder_runs"] for worker in workers}


@pytest.fixture(scope="module")
def fleet(
    checkpoint: Path, no_session_fleet: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EncodeFleet]:
    fleet = EncodeFleet(checkpoint, tmp_path_factory.mktemp("encode-logs"))
    yield fleet
    fleet.deployment.end()


def question(number: int, **options: Any) -> dict[str, Any]:
    picture = shown(pattern(420, 300, 8500 + number))
    return chat_body(user("Here.", picture, f"Which is number {number}?"), **options)


def test_without_any_encode_worker_images_are_encoded_in_place(fleet: EncodeFleet) -> None:
    frontend = fleet.frontend
    before = fleet.runs()
    helped = frontend.ask(CHAT, question(1))
    assert helped.headers["x-foveal-embeddings"] == "1/1"
    wait_until(
        lambda: fleet.runs() == {**before, "encode": before["encode"] + 1}, 10.0,
        "the encode worker's count",
    )
    fleet.encoder.signal(signal.SIGKILL)
    wait_until(lambda: frontend.has_workers(1), 30.0, "the loss noticed")

    # What it left is still of use: another prompt about its image needs no encoder.
    kept = frontend.ask(CHAT, question(1, cache_salt="kept"))
    assert kept.headers["x-foveal-embeddings"] == "1/1"
    assert differences(answer_of(kept), answer_of(helped)) == []

    new = frontend.ask(CHAT, question(2))
    assert new.headers["x-foveal-embeddings"] == "0/1"
    for cache in ("prefix", "encoder"):
        frontend.http.post(f"/reset_{cache}_cache").raise_for_status()
    wait_until(lambda: frontend.shared_embeddings() == 0, 10.0, "news of the reset")
    again = frontend.ask(CHAT, question(1))
    assert again.headers["x-foveal-embeddings"] == "0/1"
    assert differences(answer_of(again), answer_of(helped)) == []
    wait_until(
        lambda: fleet.runs() == {"generate": before["generate"] + 2}, 10.0,
        "the other worker's count",
    )
