"""Workers on a Ray cluster (``launcher: ray``), one actor each."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from configs.deployment.commands import Command
from configs.deployment.progress import Row
from configs.deployment.ray_worker import BAD_SETTING, RayWorker
from configs.deployment.schema import Deployment

REACH_SECONDS = 5.0
WAIT_SECONDS = 0.5
ASK_SECONDS = 1.0
"""How often each actor is asked."""
CARRIED = ("PYTHONPATH", "PATH")


class RayFailed(Exception):
    """Ray is not there, or a worker cannot work with its settings."""


@dataclass
class _Placed:
    """One actor as last heard of."""

    command: Command
    actor: Any
    question: Any = None
    ask_at: float = 0.0
    place: tuple[str, int] | None = None
    """Host and process id."""
    state: str = "waiting for Ray to place it"
    detail: str = ""


class WorkersByRay:
    """Starts one actor for each command and tells what Ray makes of them."""

    def __init__(
        self,
        deployment: Deployment,
        commands: Sequence[Command],
        environment: dict[str, str],
        say: Callable[[str], None],
    ) -> None:
        """
        Raises:
            RayFailed: Ray is not installed.
        """
        try:
            import ray
        except ImportError as error:
            raise RayFailed(
                "launcher: ray needs Ray: pip install 'foveal[ray]'"
            ) from error
        self._ray = ray
        self._settings = deployment.ray
        self._commands = commands
        self._environment = environment
        self._say = say
        self._workers: list[_Placed] = []
        self._stopping: list[Any] = []
        self._stop_by = 0.0

    def start(self) -> None:
        """
        Raises:
            RayFailed: the cluster cannot be reached.
        """
        ray = self._ray
        try:
            _reach(self._settings.address)
            ray.init(
                address=self._settings.address, log_to_driver=False, logging_level="ERROR",
                configure_logging=False,
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise RayFailed(
                f"no Ray cluster at {self._settings.address}: {error}; start one with "
                "`ray start --head`, and `ray start --address HEAD:6379` on the other nodes"
            ) from error
        remote = ray.remote(RayWorker)
        variables = {name: os.environ[name] for name in CARRIED if name in os.environ}
        for command in self._commands:
            actor = remote.options(
                num_cpus=self._settings.cpus,
                num_gpus=command.gpus,
                resources=self._settings.resources or None,
                max_restarts=-1,
                runtime_env={"env_vars": variables},
            ).remote(command.arguments, {**self._environment, **command.environment})
            self._workers.append(_Placed(command, actor))

    def look_after(self) -> None:
        """Hear what has become of each worker, and say what has changed.

        Raises:
            RayFailed: one says itself that its settings cannot work.
        """
        ray, now = self._ray, time.monotonic()
        for worker in self._workers:
            if worker.question is None:
                if now < worker.ask_at:
                    continue
                worker.ask_at = now + ASK_SECONDS
                worker.question = worker.actor.describe.remote()
            done, _ = ray.wait([worker.question], timeout=0)
            if not done:
                continue
            question, worker.question = worker.question, None
            try:
                self._note(worker, ray.get(question))
            except ray.exceptions.RayError as error:
                if worker.state != "ended":
                    self._say(f"{worker.command.name} ended; Ray starts it again")
                worker.state, worker.detail = "ended", str(error).splitlines()[0]

    def _note(self, worker: _Placed, said: dict[str, Any]) -> None:
        name, lines = worker.command.name, said["last_lines"]
        if said["exit_status"] == BAD_SETTING:
            text = "\n".join(f"  | {line}" for line in lines)
            raise RayFailed(f"{name} on {said['host']} cannot work:\n{text}")
        place = (said["host"], said["pid"])
        if worker.place != place:
            again = " again" if worker.place else ""
            gpus = f", GPU {said['gpus']}" if worker.command.gpus else ""
            self._say(f"Ray started {name}{again} on {place[0]}, process {place[1]}{gpus}")
            worker.place = place
        worker.state = "running" if said["exit_status"] is None else "ended"
        worker.detail = lines[-1] if lines else ""

    def rows(self) -> list[Row]:
        return [
            Row(w.command.name, w.place[0] if w.place else w.state, w.detail)
            for w in self._workers
        ]

    def begin_to_stop(self, seconds: float) -> None:
        """Have all workers end in good order, for which they have so many ``seconds``."""
        if self._ray.is_initialized():
            self._stopping = [w.actor.stop.remote(seconds) for w in self._workers if w.place]
            self._stop_by = time.monotonic() + seconds + REACH_SECONDS

    def stop(self, hurry: Callable[[], bool] = lambda: False) -> None:
        """Wait until they have, or ``hurry`` becomes true, and end their actors; leave the
        cluster alone."""
        ray = self._ray
        if not ray.is_initialized():
            return
        left = self._stopping
        while left and time.monotonic() < self._stop_by and not hurry():
            _, left = ray.wait(left, num_returns=len(left), timeout=WAIT_SECONDS)
        for worker in self._workers:
            ray.kill(worker.actor, no_restart=True)
        ray.shutdown()


def _reach(address: str) -> None:
    """Find out soon that nobody is at ``address``: Ray itself would try for minutes.

    Raises:
        OSError: there is nobody.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()
