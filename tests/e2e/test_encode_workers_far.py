"""An encode worker on another host than all that generate: its outputs come by NIXL.

Two engines of its own. What is right is what the same worker answers when it encodes for
itself.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.e2e.answers import answer_of, differences
from tests.e2e.cases import CHAT
from tests.e2e.fleet import Deployment, Frontend
from tests.e2e.hosts import TwoHosts
from tests.e2e.processes import Process, free_port, wait_until
from tests.e2e.test_encode_workers import question
from transfer.access import make_keys

SHARED = ("--multimodal-embedding-cache-capacity-gb", "0.25", "--mm-worker-cache-gb", "0.25")
OVER_TCP = {"UCX_TLS": "tcp"}


def encoder_runs(frontend: Frontend) -> dict[str, int]:
    """By role, as far as workers have told."""
    workers = frontend.workers().values()
    return {worker["facts"]["role"]: worker["encoder_runs"] for worker in workers}


def start(
    here: Deployment, there: Deployment, hosts: TwoHosts
) -> tuple[Frontend, Process]:
    """A frontend and a worker on one host, and an encode worker on the other."""
    make_keys(there.directory / "keys")
    shared = (
        "--mm-identity-seed-file", str(there.directory / "seed"),
        "--secure-keys", str(there.directory / "keys"),
    )
    port = free_port()
    encoder = there.start_worker(
        *shared, *SHARED, "--role", "encode", "--host", hosts.other.address,
        "--port", str(port), env={**OVER_TCP, "VLLM_HOST_IP": hosts.other.address},
        before=hosts.other.inside, name="encoder",
    )
    here.start_worker(
        *shared, *SHARED, env={**OVER_TCP, "VLLM_HOST_IP": hosts.one.address},
        before=hosts.one.inside,
    )
    frontend = here.start_frontend(
        *shared, "--worker", f"tcp://{hosts.other.address}:{port}",
        "--mm-preprocess-workers", "0", socket=True, before=hosts.one.inside,
        env={**OVER_TCP, "VLLM_SERVER_DEV_MODE": "1"},
    )
    here.await_ready([frontend], workers=2)
    return frontend, encoder


def test_its_outputs_are_used_and_nobody_misses_it(
    hosts: TwoHosts,
    no_session_fleet: None,
    checkpoint: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    there = Deployment(checkpoint, tmp_path_factory.mktemp("far-there"), "far-there")
    here = Deployment(checkpoint, tmp_path_factory.mktemp("far-here"), "far-here")
    try:
        frontend, encoder = start(here, there, hosts)
        before = encoder_runs(frontend)
        helped = frontend.ask(CHAT, question(11))
        assert helped.headers["x-foveal-embeddings"] == "1/1"
        once = {**before, "encode": before["encode"] + 1}
        wait_until(lambda: encoder_runs(frontend) == once, 10.0, "the encode worker's count")
        assert frontend.metric("foveal_embedding_moves_total") == 1

        # Nobody remembers anything: the encode worker's host does not, either.
        for cache in ("prefix", "encoder"):
            frontend.http.post(f"/reset_{cache}_cache").raise_for_status()
        wait_until(lambda: frontend.shared_embeddings() == 0, 10.0, "news of the reset")
        encoder.signal(signal.SIGKILL)
        wait_until(lambda: frontend.has_workers(1), 30.0, "the loss noticed")
        alone = frontend.ask(CHAT, question(11))
        assert alone.headers["x-foveal-embeddings"] == "0/1"
        assert differences(answer_of(helped), answer_of(alone)) == []
        wait_until(
            lambda: encoder_runs(frontend) == {"generate": before["generate"] + 1}, 10.0,
            "the other worker's count",
        )
    except BaseException:
        for name, lines in {**there.last_lines(), **here.last_lines()}.items():
            print(f"--- {name}\n{lines}")
        raise
    finally:
        here.end()
        there.end()
