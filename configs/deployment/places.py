"""What a deployment needs of this host: a free port, and directories."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

REGISTRY_PREFIX = "foveal-up-"


def check_port(host: str, port: int) -> str:
    """Why nothing can listen there; empty when something can."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        other = 8010 if port != 8010 else 8020
        remedy = (
            f"take another port, as in `foveal up --port {other}` or `make serve PORT={other}`"
            if error.errno in (errno.EADDRINUSE, errno.EACCES)
            else "`--host` is an address of this host, 0.0.0.0 for all of them"
        )
        return f"cannot listen on {host} port {port}: {error.strerror}; {remedy}"
    return ""


def local_url(host: str, port: int) -> str:
    """Where a server that listens on ``host`` is reached from this machine."""
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"


@contextlib.contextmanager
def own_registry() -> Iterator[Path]:
    """A directory with a short name: paths of Unix sockets must fit into 107 bytes."""
    base = Path(tempfile.gettempdir())
    if len(str(base)) > 24:
        base = Path("/tmp")
    for left_over in base.glob(f"{REGISTRY_PREFIX}*-*"):
        owner = left_over.name.removeprefix(REGISTRY_PREFIX).partition("-")[0]
        if not Path("/proc", owner).exists():
            shutil.rmtree(left_over, ignore_errors=True)
    path = tempfile.mkdtemp(prefix=f"{REGISTRY_PREFIX}{os.getpid()}-", dir=base)
    try:
        yield Path(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def remove_shared_memory(pids: Iterable[int]) -> None:
    """What processes could not remove themselves because they were killed."""
    for pid in pids:
        for segment in Path("/dev/shm").glob(f"foveal-{pid}-*"):
            segment.unlink(missing_ok=True)
