"""An etcd of the tests' own: Debian's ``etcd-server``, which `make system-packages` gets."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

START_SECONDS = 30.0


def require_etcd() -> None:
    """Skip a test where etcd is not installed, and say how to get it."""
    if shutil.which("etcd") is None:
        pytest.skip("NO ETCD: apt-get install etcd-server (make system-packages)")


class EtcdServer:
    """One etcd on 127.0.0.1; may be killed and started again on the same port."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.port, self._peer_port = _free_ports()
        self.address = f"etcd://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        client = f"http://127.0.0.1:{self.port}"
        peer = f"http://127.0.0.1:{self._peer_port}"
        with (self._directory / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    "etcd", "--name", "one", "--data-dir", str(self._directory / "data"),
                    "--listen-client-urls", client, "--advertise-client-urls", client,
                    "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                    "--initial-cluster", f"one={peer}",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._is_healthy():
            assert self._process.poll() is None, self._log()
            assert time.monotonic() < deadline, self._log()
            time.sleep(0.05)

    def kill(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(10.0)

    def forget(self) -> None:
        """Lose all data; etcd must not be running."""
        shutil.rmtree(self._directory / "data")

    def end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(10.0)
            except subprocess.TimeoutExpired:
                self.kill()

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.port}/health", timeout=1
            ) as answer:
                return b'"true"' in answer.read()
        except OSError:
            return False

    def _log(self) -> str:
        return (self._directory / "etcd.log").read_text(errors="replace")[-2000:]


def _free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        return one.getsockname()[1], two.getsockname()[1]
