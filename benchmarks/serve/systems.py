"""The systems that are compared: how each is started, and when it is ready.

All have the same model, engine flags and number of threads.
"""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.client import BadAnswer, Client
from benchmarks.processes import (
    CHECKPOINT,
    ENGINE_FLAGS,
    ENVIRONMENT,
    Servers,
    free_ports,
    is_up,
    ready_workers,
)
from benchmarks.serve.dynamo import low_ports, name_vllm
from benchmarks.transfer.peer_dynamo import dynamo_python

WORKERS = 2


@dataclass(frozen=True)
class System:
    """A system; ``start`` begins to start it and returns where requests go."""

    name: str
    title: str
    start: Callable[[Servers], Sequence[int]]
    ready: Callable[[Sequence[int]], bool]


def _start_foveal(servers: Servers) -> Sequence[int]:
    (port,) = free_ports(1)
    for number in range(WORKERS):
        servers.start_worker(f"worker-{number}")
    servers.start_frontend("frontend", port)
    return [port]


def _start_vllm(count: int) -> Callable[[Servers], Sequence[int]]:
    def start(servers: Servers) -> Sequence[int]:
        ports = free_ports(count)
        for number, port in enumerate(ports):
            servers.start_plain(f"vllm-{number}", port)
        return ports

    return start


def _start_dynamo(*flags: str) -> Callable[[Servers], Sequence[int]]:
    def start(servers: Servers) -> Sequence[int]:
        python = dynamo_python()
        port, *others = free_ports(1 + 2 * WORKERS)
        status = low_ports(WORKERS)
        environment = {
            **ENVIRONMENT,
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(servers.directory / "kv"),
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYNAMO_MM_TRANSFER": "shm",
            "PYTHONPATH": str(name_vllm(servers.directory)),
        }
        for number in range(WORKERS):
            events, rpc = others[2 * number : 2 * number + 2]
            publisher = {
                "publisher": "zmq", "topic": "kv-events", "endpoint": f"tcp://*:{events}",
                "enable_kv_cache_events": True,
            }
            servers.start_command(
                f"dynamo-worker-{number}",
                [
                    str(python), "-m", "dynamo.vllm", "--model", str(CHECKPOINT),
                    "--enable-multimodal", "--enable-prefix-caching",
                    "--kv-events-config", json.dumps(publisher), *ENGINE_FLAGS,
                ],
                {**environment, "DYN_SYSTEM_PORT": str(status[number]), "VLLM_PORT": str(rpc)},
            )
        servers.start_command(
            "dynamo-frontend",
            [
                str(python), "-m", "dynamo.frontend", "--http-port", str(port),
                "--router-mode", "kv", "--kv-cache-block-size", "32", *flags,
            ],
            environment,
        )
        return [port]

    return start


def _foveal_is_ready(ports: Sequence[int]) -> bool:
    return ready_workers(ports[0]) == WORKERS and is_up(ports[0])


def _all_are_up(ports: Sequence[int]) -> bool:
    return all(map(is_up, ports))


def _dynamo_is_ready(ports: Sequence[int]) -> bool:
    with contextlib.suppress(OSError, http.client.HTTPException, BadAnswer, ValueError):
        with Client(ports[0], timeout=5) as client:
            health = client.get("/health")
        generating = [
            instance
            for instance in health.get("instances", ())
            if instance.get("endpoint") == "generate"
        ]
        return len(generating) >= WORKERS and bool(model_of(ports[0]))
    return False


def model_of(port: int) -> str:
    """The name of the model that a server serves; empty while it serves none."""
    with contextlib.suppress(OSError, http.client.HTTPException, BadAnswer, ValueError):
        with Client(port, timeout=5) as client:
            models = client.get("/v1/models")["data"]
        if models:
            return str(models[0]["id"])
    return ""


SYSTEMS = {
    system.name: system
    for system in (
        System("foveal", "Foveal, 2 workers", _start_foveal, _foveal_is_ready),
        System("vllm", "vLLM, one engine", _start_vllm(1), _all_are_up),
        System("vllm_rr", "vLLM, 2 engines in turn", _start_vllm(WORKERS), _all_are_up),
        System(
            "dynamo_py", "Dynamo, vLLM chat processor, 2 workers",
            _start_dynamo("--dyn-chat-processor", "vllm"), _dynamo_is_ready,
        ),
        System("dynamo_rust", "Dynamo, Rust frontend, 2 workers", _start_dynamo(),
               _dynamo_is_ready),
    )
}

