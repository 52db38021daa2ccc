"""The Ray actor that is one worker: it starts the process and ends when that ends.

Ray decides on which node an actor runs, reserves its GPUs there (and names them to it in
CUDA_VISIBLE_DEVICES), and starts it again, on another node if need be, when it has ended.
Nothing of that is done here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import deque
from typing import Any

from configs.deployment.children import end_with_parent
from configs.deployment.commands import reachable

PAUSE_SECONDS = 2.0
"""Between the end of the process and that of the actor, so that what cannot start is not
started over and over without a pause."""
KEPT_LINES = 200
BAD_SETTING = 2
"""Exit status that starting again would not change: the actor stays and says so."""


class RayWorker:
    """Wrapped by ``ray.remote`` where it is used; all methods run in its main thread."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        import ray.util

        self._host = ray.util.get_node_ip_address()
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._stopping = False
        arguments = reachable(arguments, self._host)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "workers", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=end_with_parent(),
        )
        threading.Thread(target=self._follow, daemon=True).start()

    def describe(self) -> dict[str, Any]:
        """Where it runs, and the exit status of a process that will not be started again."""
        return {
            "host": self._host,
            "pid": self._process.pid,
            "actor_pid": os.getpid(),
            "gpus": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            "exit_status": self._process.poll(),
            "last_lines": list(self._lines)[-30:],
        }

    def stop(self, seconds: float) -> int | None:
        """End the process, and return its exit status; None if it does not end in time."""
        self._stopping = True
        self._process.terminate()
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def _follow(self) -> None:
        """Keep the last lines; Ray gathers what actors print as their log."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line.rstrip("\n"))
            print(line, end="", flush=True)
        status = self._process.wait()
        if self._stopping or status == BAD_SETTING:
            return
        time.sleep(PAUSE_SECONDS)
        # Without ceremony: an actor that ends in good order is not started again.
        os._exit(1)
