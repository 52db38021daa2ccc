"""How workers and frontends find each other: by a directory, or by etcd."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Protocol

from transfer.etcd.address import EtcdAddress, own_address_towards, parse_etcd_address
from transfer.etcd.discovery import EtcdDiscovery
from transfer.identity import load_or_create_seed
from transfer.registry import Registry, WorkerRecord


class Discovery(Protocol):
    """Where workers announce themselves and frontends look for them."""

    def shared_seed(self) -> bytes:
        """The secret seed of image identities, the same for the whole namespace."""

    def socket_directory(self, worker: str) -> Path:
        """Make and return the directory for a worker's sockets, on this host."""

    def announce(self, record: WorkerRecord) -> None: ...

    def withdraw_record(self, worker: str) -> None:
        """Take ``worker`` off the list; its sockets stay. Doing so twice is no error."""

    def withdraw(self, worker: str) -> None:
        """Remove all that belongs to ``worker``. Doing so twice is no error."""

    def watch(self) -> AsyncGenerator[dict[str, WorkerRecord]]:
        """Yield the workers by name, now and after every change."""

    def close(self) -> None:
        """Withdraw what this process announced, as far as that takes no long wait."""


def open_discovery(discovery: str | None, registry: Path | None, namespace: str) -> Discovery:
    """The etcd that ``discovery`` names, or the directory ``registry`` without one.

    Raises:
        TransferError: neither is usable; the text says why.
    """
    local = Registry(registry, namespace)
    if discovery is None:
        return local
    return EtcdDiscovery(parse_etcd_address(discovery), namespace, local)


def seed_of(discovery: Discovery, seed_file: Path | None) -> bytes:
    """The seed in ``seed_file``, or without one that which the namespace shares.

    Raises:
        TransferError, OSError: there is none that can be used.
    """
    return load_or_create_seed(seed_file) if seed_file else discovery.shared_seed()


def announced_address(address: str, discovery: str | None) -> str:
    """What to announce for a worker that listens on ``address``.

    "All addresses of this host" means nothing elsewhere: with etcd, the one on which etcd
    is reached takes its place.

    Raises:
        TransferError: there is no way to etcd.
    """
    if discovery is None:
        return address
    etcd: EtcdAddress = parse_etcd_address(discovery)
    for everywhere in ("tcp://0.0.0.0:", "tcp://[::]:"):
        if address.startswith(everywhere):
            return f"tcp://{own_address_towards(etcd)}:{address.removeprefix(everywhere)}"
    return address
