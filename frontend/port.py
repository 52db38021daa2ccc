"""A port that several processes of this user serve together."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from configs.flags import BadSetting


@contextlib.contextmanager
def reserved(host: str, port: int) -> Iterator[None]:
    """Within, processes that share the port by SO_REUSEPORT can bind it.

    It is bound here too, without listening, so that no connection comes here and nobody
    else can take it while such a process is started anew.

    Raises:
        BadSetting: somebody has it already.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with _socket(family) as probe:
            # Without sharing: another group of processes that share it is in the way too.
            probe.bind((host, port))
        held = _socket(family)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((host, port))
    except OSError as error:
        raise BadSetting(f"cannot listen on port {port}: {error.strerror}") from error
    with held:
        yield


def _socket(family: socket.AddressFamily) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return made
