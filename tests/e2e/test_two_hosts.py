"""A worker on another host than the frontends: its tensors come by NIXL over TCP.

Has one engine of its own, so the session's fleet is ended first. What is right is what a
frontend on the worker's own host answers, by shared memory.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.answers import answer_of, differences
from tests.e2e.cases import CASES, CHAT, Case, chat_body, shown, user
from tests.e2e.fleet import Deployment, Frontend
from tests.e2e.hosts import TwoHosts
from tests.e2e.pictures import pattern
from tests.e2e.processes import free_port
from transfer.access import make_keys

OVER_TCP = {"UCX_TLS": "tcp"}
SOME_CASES = [
    case
    for case in CASES
    if case.name
    in ("picture_astronaut", "four_pictures", "the_same_picture_twice", "streamed",
        "two_answers", "frames_of_a_video")
]


def embeddings(tokens: int = 64, width: int = 128) -> dict[str, Any]:
    """The part of a message that sends an encoder's output instead of a picture."""

    def encoded(tensor: torch.Tensor) -> str:
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        return base64.b64encode(buffer.getvalue()).decode()

    values = torch.rand(tokens, width, generator=torch.Generator().manual_seed(1))
    grid = torch.tensor([1, 2, 2 * tokens])
    fields = {"image_embeds": encoded(values), "image_grid_thw": encoded(grid)}
    return {"type": "image_embeds", "image_embeds": fields}


SOME_CASES.append(Case("embeddings", CHAT, chat_body(user(embeddings(), "What is it?"))))


@dataclass
class Fleet:
    beside: Frontend
    """On the worker's host."""
    nixl: Frontend
    inline: Frontend
    """Both on the other."""


@pytest.fixture(scope="module")
def fleet(
    hosts: TwoHosts,
    no_session_fleet: None,
    checkpoint: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Fleet]:
    # A registry for each host: they find each other by address alone.
    there = Deployment(checkpoint, tmp_path_factory.mktemp("there"), "there")
    here = Deployment(checkpoint, tmp_path_factory.mktemp("here"), "here")
    make_keys(there.directory / "keys")
    shared = (
        "--mm-identity-seed-file", str(there.directory / "seed"),
        "--secure-keys", str(there.directory / "keys"),
    )
    port = free_port()
    try:
        there.start_worker(
            *shared, "--host", hosts.other.address, "--port", str(port),
            "--mm-worker-cache-gb", "0.25", "--enable-mm-embeds",
            env={**OVER_TCP, "VLLM_HOST_IP": hosts.other.address},
            before=hosts.other.inside,
        )
        beside = there.start_frontend(
            *shared, "--enable-mm-embeds", socket=True, before=hosts.other.inside,
            name="beside", env={"VLLM_SERVER_DEV_MODE": "1"},
        )
        address = ("--worker", f"tcp://{hosts.other.address}:{port}")
        by_mode = {
            name: here.start_frontend(
                *shared, *address, "--mm-transfer", mode, "--enable-mm-embeds",
                env=OVER_TCP, socket=True, before=hosts.one.inside, name=name,
            )
            for name, mode in (("nixl", "auto"), ("inline", "inline"))
        }
        there.await_ready([beside], workers=1)
        here.await_ready(list(by_mode.values()), workers=1)
        yield Fleet(beside, **by_mode)
    except BaseException:
        for name, lines in {**there.last_lines(), **here.last_lines()}.items():
            print(f"--- {name}\n{lines}")
        raise
    finally:
        here.end()
        there.end()


def ask_anew(fleet: Fleet, frontend: Frontend, case: Case) -> tuple[Any, set[str]]:
    """The answer when the engine remembers nothing, and how the tensors went."""
    for cache in ("prefix", "encoder"):
        assert fleet.beside.http.post(f"/reset_{cache}_cache").status_code == 200
    response = frontend.ask(case.path, case.body)
    return answer_of(response), set(response.headers["x-foveal-transfer"].split(","))


def bytes_pulled(frontend: Frontend) -> float:
    text = frontend.http.get("/metrics").raise_for_status().text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "foveal_nixl_bytes_total"
    )


def test_the_fleet_says_how_tensors_go_and_why(fleet: Fleet) -> None:
    def chosen(frontend: Frontend) -> tuple[str, str]:
        (worker,) = frontend.workers().values()
        return worker["transfer"], worker["transfer_reason"]

    assert chosen(fleet.beside) == ("shm", "the worker sees the segment")
    assert chosen(fleet.nixl) == ("nixl", "the worker reads the arena by NIXL")
    assert chosen(fleet.inline) == ("inline", "asked for")


@pytest.mark.parametrize("case", SOME_CASES, ids=lambda case: case.name)
def test_the_answers_are_those_of_the_same_host(fleet: Fleet, case: Case) -> None:
    by_nixl, transfer = ask_anew(fleet, fleet.nixl, case)
    assert transfer == {"nixl"}
    inline, transfer = ask_anew(fleet, fleet.inline, case)
    assert transfer == {"inline"}
    right, transfer = ask_anew(fleet, fleet.beside, case)
    assert transfer == {"shm"}
    assert differences(by_nixl, right) == []
    assert differences(inline, right) == []


def test_embeddings_that_the_model_cannot_use_reach_no_engine(fleet: Fleet) -> None:
    for part in (embeddings(width=64), embeddings(tokens=0)):
        response = fleet.nixl.http.post(CHAT, json=chat_body(user(part, "What is it?")))
        assert response.status_code == 400, response.text
    assert fleet.nixl.is_healthy()


def test_a_picture_crosses_the_network_once(fleet: Fleet) -> None:
    case = Case("", CHAT, chat_body(user(shown(pattern(400, 300, 77)), "What?")))
    before = bytes_pulled(fleet.nixl)
    first, _ = ask_anew(fleet, fleet.nixl, case)
    once = bytes_pulled(fleet.nixl)
    again, transfer = ask_anew(fleet, fleet.nixl, case)
    assert transfer == {"nixl"}
    assert differences(first, again) == []
    assert bytes_pulled(fleet.nixl) == once >= before + 100_000
