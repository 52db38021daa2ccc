"""From a deployment to the commands that make it: what runs under which name."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from configs.deployment.options import Value, flags_of
from configs.deployment.schema import ROUTER_PREFIX, Deployment, Frontend, Router, Workers
from configs.schema import DiscoverySettings, FrontendConfig, WorkerConfig

FRONTEND = [sys.executable, "-m", "frontend"]
WORKER = [sys.executable, "-m", "workers"]


@dataclass(frozen=True)
class Command:
    """One process to start."""

    name: str
    arguments: list[str]
    """Everything behind the program itself."""
    environment: dict[str, str]
    group: int = 0
    """Which of the deployment's groups of workers; 0 for the frontend as well."""
    gpus: float = 0.0
    program: list[str] = field(default_factory=list)

    @property
    def line(self) -> list[str]:
        return [*self.program, *self.arguments]


def frontend_command(deployment: Deployment, registry: Path | None) -> Command:
    """The one command behind which all frontends are."""
    own: dict[str, Value] = {
        "http-host": deployment.http.host,
        "http-port": deployment.http.port,
        "frontends": deployment.frontend.count,
        "mm-transfer": deployment.transfer,
    }
    if deployment.served_model_name is not None:
        own["served-model-name"] = deployment.served_model_name
    for name in Router.model_fields:
        if name in deployment.router.model_fields_set:
            flag = (ROUTER_PREFIX + name).replace("_", "-")
            own[flag] = getattr(deployment.router, name)
    options = {**own, **deployment.engine, **deployment.frontend.options}
    return Command(
        "frontend",
        [*_common(deployment, registry), *flags_of(options)],
        {**_meeting_place(deployment), **deployment.frontend.environment},
        program=FRONTEND,
    )


def worker_commands(deployment: Deployment, registry: Path | None) -> list[Command]:
    """One command for each worker, numbered through all groups."""
    own: dict[str, Value] = {"insecure": True} if deployment.security.insecure else {}
    return [
        Command(
            f"worker-{number}",
            [
                *_common(deployment, registry),
                *flags_of({**own, **deployment.engine, **g.options}),
            ],
            {**_meeting_place(deployment), **g.environment},
            place,
            g.gpus,
            WORKER,
        )
        for number, (place, g) in enumerate(_each_worker(deployment), 1)
    ]


def with_devices(commands: list[Command], environ: Mapping[str, str]) -> list[Command]:
    """Give each command its GPUs of this host, one command after the other.

    Raises:
        ValueError: CUDA_VISIBLE_DEVICES names fewer than are asked for.
    """
    named = environ.get("CUDA_VISIBLE_DEVICES")
    free = named.split(",") if named else None
    taken = 0
    placed = []
    for command in commands:
        count = int(command.gpus)
        if not count:
            placed.append(command)
            continue
        wanted = range(taken, taken + count)
        if free is not None and wanted.stop > len(free):
            raise ValueError(
                f"{command.name} needs {count} more GPUs than the {len(free)} of "
                f"CUDA_VISIBLE_DEVICES={named}"
            )
        devices = ",".join(free[i] if free else str(i) for i in wanted)
        taken = wanted.stop
        environment = {"CUDA_VISIBLE_DEVICES": devices, **command.environment}
        placed.append(replace(command, environment=environment))
    return placed


def on_node(command: Command, address: str) -> Command:
    """``command`` for a worker that Ray places: reached from other nodes at ``address``."""
    return replace(command, arguments=reachable(command.arguments, address))


def reachable(arguments: list[str], address: str) -> list[str]:
    """``arguments`` of a worker, with an address and a free port where they name none."""
    if "--port" in arguments:
        return arguments
    return [*arguments, "--host", address, "--port", "0"]


def logging_environment(deployment: Deployment) -> dict[str, str]:
    """What has all processes log in one format, from their first line on."""
    return {"FOVEAL_LOG_FORMAT": deployment.logs.format}


def drain_seconds(deployment: Deployment, environ: Mapping[str, str]) -> float:
    """How long a process may take to finish what it has when it is told to end: of all
    that the deployment starts, the longest."""
    groups: list[tuple[type[DiscoverySettings], Frontend | Workers]] = [
        (FrontendConfig, deployment.frontend), *((WorkerConfig, g) for g in deployment.workers)
    ]
    everywhere = {**environ, **deployment.environment}
    return max(
        _drain_timeout(settings, group.options, {**everywhere, **group.environment})
        for settings, group in groups
    )


def _drain_timeout(
    settings: type[DiscoverySettings],
    options: Mapping[str, Value],
    environ: Mapping[str, str],
) -> float:
    default = settings.model_fields["drain_timeout"].default
    stated = options.get("drain-timeout", environ.get("FOVEAL_DRAIN_TIMEOUT", default))
    try:
        return float(str(stated))
    except ValueError:  # the process will say so
        return float(default)


def _each_worker(deployment: Deployment) -> Iterator[tuple[int, Workers]]:
    for place, group in enumerate(deployment.workers):
        for _ in range(group.count):
            yield place, group


def _meeting_place(deployment: Deployment) -> dict[str, str]:
    """Variables for all. etcd's address is one, since it may have a password in it, and
    whoever is on the host sees command lines."""
    if deployment.discovery is None:
        return deployment.environment
    return {"FOVEAL_DISCOVERY": deployment.discovery, **deployment.environment}


def _common(deployment: Deployment, registry: Path | None) -> list[str]:
    options: dict[str, Value] = {
        "model": deployment.model, "namespace": deployment.namespace
    }
    if registry is not None:
        options["registry"] = str(registry)
    if deployment.security.secure_keys is not None:
        options["secure-keys"] = str(deployment.security.secure_keys)
    return flags_of(options)
