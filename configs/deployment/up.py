"""``foveal up FILE``: starts what the file describes, and ends all of it with itself."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from configs.deployment.children import Child, stop_all
from configs.deployment.commands import (
    drain_seconds,
    frontend_command,
    logging_environment,
    with_devices,
    worker_commands,
)
from configs.deployment.fleet import look_at
from configs.deployment.places import (
    check_port,
    local_url,
    own_registry,
    remove_shared_memory,
)
from configs.deployment.progress import Progress, Row
from configs.deployment.reading import DeploymentFile
from configs.deployment.sample_request import text_request, write_image_request
from configs.deployment.service import Service, ServiceFailed
from configs.deployment.stop_signals import StopSignals
from configs.deployment.workers_by_ray import RayFailed, WorkersByRay

STOP_SECONDS = 30.0
"""How long a process may take to end, beside what it takes to finish its answers."""
LOOK_SECONDS = 0.5
PARTS = ("frontend", "workers")


class UpFailed(Exception):
    """It cannot start or cannot go on; the text says why."""


class Up:
    """One deployment, from its start to its end."""

    def __init__(
        self, file: DeploymentFile, parts: Sequence[str], environ: Mapping[str, str]
    ) -> None:
        """``parts``: which of ``PARTS`` this host runs."""
        self._file = file
        self._deployment = file.deployment
        self._parts = parts
        self._environ = environ
        self._directory = (self._deployment.directory or Path(".foveal", file.name)).absolute()
        logs = self._deployment.logs.directory
        self._logs = logs.absolute() if logs else self._directory / "logs"
        self._url = local_url(self._deployment.http.host, self._deployment.http.port)
        self._progress = Progress()
        self._signals = StopSignals()
        self._services: list[Service] = []
        self._ray: WorkersByRay | None = None

    def run(self) -> None:
        """Start everything and stay until a signal comes; nothing is left then.

        Raises:
            UpFailed: it cannot start, or a part that it cannot do without has ended.
        """
        self._check_host()
        with contextlib.ExitStack() as cleanup:
            registry = self._deployment.registry
            if registry is None:
                registry = cleanup.enter_context(own_registry())
            try:
                self._prepare()
                self._start(registry)
                if self._wait_until_ready():
                    self._announce()
                    self._look_after()
            except (ServiceFailed, RayFailed) as failure:
                raise UpFailed(str(failure)) from failure
            finally:
                self._stop()
        self._progress.say("Stopped")

    def _check_host(self) -> None:
        deployment = self._deployment
        if "frontend" in self._parts and (
            problem := check_port(deployment.http.host, deployment.http.port)
        ):
            raise UpFailed(problem)
        if len(self._parts) < len(PARTS) and not (deployment.registry or deployment.discovery):
            raise UpFailed(
                f"{self._file.path}: with --only, the parts find each other by `discovery`, "
                "or by a `registry` directory on one host"
            )

    def _prepare(self) -> None:
        for number, step in enumerate(self._deployment.prepare, 1):
            if self._signals.stop() or (step.makes is not None and step.makes.exists()):
                continue
            program, *arguments = step.command
            program = sys.executable if program == "python" else program
            log = self._logs / f"prepare-{number}.log"
            environment = self._deployment.environment
            try:
                child = Child("prepare", [program, *arguments], log, environment)
            except OSError as error:
                raise UpFailed(f"cannot run {program}: {error.strerror}") from error
            while child.running and not self._signals.stop():
                self._progress.show(f"first: {' '.join(step.command)}")
                time.sleep(0.1)
            stop_all([child], STOP_SECONDS, self._signals.hurry)
            if child.exit_status and not self._signals.stop():
                lines = "\n".join(f"  | {line}" for line in child.last_lines(30))
                raise UpFailed(
                    f"{' '.join(step.command)} failed ({child.how_it_ended()}); the end of "
                    f"{log}:\n{lines}"
                )

    def _start(self, registry: Path) -> None:
        deployment, everywhere = self._deployment, logging_environment(self._deployment)
        commands = []
        if "frontend" in self._parts:
            commands.append(frontend_command(deployment, registry))
        if "workers" in self._parts:
            if deployment.launcher == "ray":
                shared = deployment.registry and deployment.registry.absolute()
                self._ray = WorkersByRay(
                    deployment, worker_commands(deployment, shared), everywhere,
                    self._progress.say,
                )
                self._ray.start()
                self._signals.install()  # Ray takes SIGTERM for itself
            else:
                try:
                    commands += with_devices(
                        worker_commands(deployment, registry), self._environ
                    )
                except ValueError as error:
                    raise UpFailed(str(error)) from error
        for command in commands:
            if self._signals.stop():
                return
            service = Service(
                command, self._logs / f"{command.name}.log", everywhere, self._progress.say
            )
            self._services.append(service)
            service.start()

    def _wait_until_ready(self) -> bool:
        """Wait for all that is started here; false if told to stop instead."""
        next_look = 0.0
        while not self._signals.stop():
            for service in self._services:
                service.must_run()
            if self._ray is not None:
                self._ray.look_after()
            if self._progress.elapsed >= next_look:
                summary, ready = self._state()
                if ready:
                    return True
                if self._progress.elapsed > self._deployment.start_timeout:
                    raise UpFailed(
                        f"not ready after {self._deployment.start_timeout:.0f} s: {summary}; "
                        f"see {self._logs}"
                    )
                next_look = self._progress.elapsed + LOOK_SECONDS
                rows = [
                    Row(service.name, "starting", service.last_line())
                    for service in self._services
                ]
                if self._ray is not None:
                    rows += self._ray.rows()
                self._progress.show(f"waiting: {summary} (logs: {self._logs})", rows)
            time.sleep(0.1)
        return False

    def _state(self) -> tuple[str, bool]:
        """How far it has come, in words, and whether that is all there is to wait for."""
        if "frontend" not in self._parts:
            # Only frontends know when a worker serves.
            return "workers started", True
        fleet = look_at(self._url, self._api_key())
        if "workers" not in self._parts:
            return "frontend up" if fleet.answers else "frontend loading", fleet.answers
        expected = self._deployment.expected_workers
        words = "frontend up" if fleet.answers else "frontend loading"
        return (
            f"{words}, {fleet.ready} of {expected} workers ready",
            fleet.healthy and fleet.ready >= expected,
        )

    def _announce(self) -> None:
        deployment, took = self._deployment, f"{self._progress.elapsed:.0f} s"
        if "frontend" not in self._parts:
            self._progress.say(
                f"Started {deployment.worker_count} workers after {took}; "
                "`foveal status URL` shows when the frontends can use them.\n"
                "Ctrl-C stops them."
            )
            return
        model = deployment.served_model_name or deployment.model
        request = self._directory / "request.json"
        request.parent.mkdir(parents=True, exist_ok=True)
        write_image_request(request, model)
        key = " -H \"Authorization: Bearer $VLLM_API_KEY\"" if self._api_key() else ""
        curl = (
            f"{self._url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d"
        )
        note = f", {deployment.note}" if deployment.note else ""
        workers = (
            f"{deployment.expected_workers} workers"
            if "workers" in self._parts
            else "waiting for workers"
        )
        self._progress.say(
            f"Ready after {took}: {self._url} (model {model}, {workers}{note})\n\n"
            "A picture; send it twice and compare the x-foveal-* headers:\n"
            f"  curl -si {curl} @{request}\n\n"
            "Text:\n"
            f"  curl -s {curl} '{json.dumps(text_request(model))}'\n\n"
            "Ctrl-C stops it."
        )

    def _look_after(self) -> None:
        """Stay until told to stop; what ends is started again."""
        while not self._signals.stop():
            for service in self._services:
                service.look_after()
            if self._ray is not None:
                self._ray.look_after()
            time.sleep(0.1)

    def _stop(self) -> None:
        self._progress.say("Stopping ...")
        children = [s.child for s in self._services if s.child is not None]
        drain = drain_seconds(self._deployment, self._environ)
        if self._ray is not None:
            # Together with the frontends, which have answers under way on these workers.
            self._ray.begin_to_stop(drain + STOP_SECONDS / 2)
        for child in stop_all(children, drain + STOP_SECONDS, self._signals.hurry):
            self._progress.say(f"{child.name} did not stop in time and was killed")
        if self._ray is not None:
            self._ray.stop(self._signals.hurry)
        pids = [pid for s in self._services for pid in s.past] + [c.pid for c in children]
        remove_shared_memory(pids)
        self._progress.close()

    def _api_key(self) -> str:
        deployment = self._deployment
        environment = {
            **self._environ, **deployment.environment, **deployment.frontend.environment
        }
        option = deployment.frontend.options.get("api-key", "")
        keys = option if isinstance(option, list) else [option]
        return str(keys[0] or environment.get("VLLM_API_KEY", "")) if keys else ""


def run_up(file: DeploymentFile, parts: Sequence[str]) -> None:
    """
    Raises:
        UpFailed: see ``Up.run``.
    """
    Up(file, parts, os.environ).run()
