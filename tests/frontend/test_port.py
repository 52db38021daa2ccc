"""A port is held for those that share it, and refused where somebody has it."""

from __future__ import annotations

import socket

import pytest

from configs.flags import BadSetting
from frontend.port import reserved


def listening(port: int, *, shared: bool) -> socket.socket:
    made = socket.socket()
    try:
        if shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(("127.0.0.1", port))
        made.listen()
    except OSError:
        made.close()
        raise
    return made


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_those_that_share_it_can_listen_and_are_connected_to(port: int) -> None:
    with reserved("127.0.0.1", port), listening(port, shared=True) as server:
        for _ in range(8):
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                server.settimeout(5)
                server.accept()[0].close()


def test_others_cannot_take_it(port: int) -> None:
    with reserved("127.0.0.1", port), pytest.raises(OSError, match="in use"):
        listening(port, shared=False)


@pytest.mark.parametrize("shared", [True, False])
def test_a_port_that_somebody_serves_is_refused(port: int, shared: bool) -> None:
    with (
        listening(port, shared=shared),
        pytest.raises(BadSetting, match=f"cannot listen on port {port}"),
        reserved("127.0.0.1", port),
    ):
        pass
