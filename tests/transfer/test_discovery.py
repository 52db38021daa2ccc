"""Which discovery a deployment gets, and what it is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from transfer.discovery import announced_address, open_discovery, seed_of
from transfer.errors import TransferError
from transfer.etcd.discovery import EtcdDiscovery
from transfer.registry import Registry


def test_without_etcd_it_is_the_directory(registry: Registry) -> None:
    assert isinstance(open_discovery(None, registry.path.parent, "test"), Registry)


def test_with_etcd_sockets_stay_in_the_directory(registry: Registry) -> None:
    found = open_discovery("etcd://127.0.0.1:1", registry.path.parent, "test")
    assert isinstance(found, EtcdDiscovery)
    assert found.socket_directory("w").parent == registry.path


def test_an_address_that_makes_no_sense_is_refused(registry: Registry) -> None:
    with pytest.raises(TransferError):
        open_discovery("etcd://nowhere", registry.path.parent, "test")


def test_a_seed_file_comes_before_what_is_shared(registry: Registry, tmp_path: Path) -> None:
    assert seed_of(registry, None) == registry.seed_path.read_bytes()
    file = tmp_path / "seed"
    assert seed_of(registry, file) == file.read_bytes() != seed_of(registry, None)


@pytest.mark.parametrize(
    "address, discovery, announced",
    [
        ("tcp://0.0.0.0:5", None, "tcp://0.0.0.0:5"),
        ("tcp://0.0.0.0:5", "etcd://127.0.0.1:1", "tcp://127.0.0.1:5"),
        ("tcp://10.0.0.1:5", "etcd://127.0.0.1:1", "tcp://10.0.0.1:5"),
    ],
)
def test_all_addresses_means_the_one_towards_etcd(
    address: str, discovery: str | None, announced: str
) -> None:
    assert announced_address(address, discovery) == announced
