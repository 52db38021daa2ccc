"""Ports, addresses and directories of this host."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from configs.deployment.places import (
    REGISTRY_PREFIX,
    check_port,
    local_url,
    own_registry,
    remove_shared_memory,
)


def test_a_port_that_is_free_and_one_that_is_not() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        taken.listen()
        said = check_port("127.0.0.1", port)
    assert "Address already in use; take another port" in said
    assert check_port("127.0.0.1", port) == ""


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.1"])
def test_an_address_of_another_host_is_no_matter_of_ports(host: str) -> None:
    said = check_port(host, 8000)
    assert said.startswith(f"cannot listen on {host} port 8000: ")
    assert said.endswith("; `--host` is an address of this host, 0.0.0.0 for all of them")


@pytest.mark.parametrize(
    "host, url",
    [
        ("127.0.0.1", "http://127.0.0.1:81"), ("0.0.0.0", "http://127.0.0.1:81"),
        ("::", "http://[::1]:81"), ("fd00::1", "http://[fd00::1]:81"), ("h", "http://h:81"),
    ],
)
def test_where_a_server_is_reached_from_here(host: str, url: str) -> None:
    assert local_url(host, 81) == url


def test_a_registry_of_ones_own_is_private_short_and_ends() -> None:
    with own_registry() as path:
        assert path.stat().st_mode & 0o777 == 0o700
        assert len(str(path)) < 50
        assert str(os.getpid()) in path.name
    assert not path.exists()


def test_what_a_killed_command_left_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = Path("/tmp", f"fv{os.getpid()}")
    short.mkdir(mode=0o700)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(short))
    try:
        dead, alive = short / f"{REGISTRY_PREFIX}999999999-x", short / f"{REGISTRY_PREFIX}1-x"
        dead.mkdir()
        alive.mkdir()
        with own_registry() as path:
            assert path.parent == short
            assert not dead.exists() and alive.exists()
        alive.rmdir()
    finally:
        short.rmdir()


def test_only_shared_memory_of_the_named_processes_is_removed() -> None:
    ours, other = Path("/dev/shm/foveal-999999999-a"), Path("/dev/shm/foveal-9999999990-a")
    ours.touch()
    other.touch()
    try:
        remove_shared_memory([999999999])
        assert not ours.exists() and other.exists()
    finally:
        other.unlink()
        ours.unlink(missing_ok=True)
