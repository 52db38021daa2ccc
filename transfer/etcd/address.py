"""``--discovery etcd://[user:password@]host:port[,host:port]``, taken apart."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass, field

from transfer.errors import TransferError

_SHAPE = re.compile(
    r"(?P<scheme>etcds?)://(?:(?P<user>[^:@/]+):(?P<password>[^@/]*)@)?(?P<hosts>[^/@]+)/?"
)
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})")


@dataclass(frozen=True)
class EtcdAddress:
    """Where an etcd cluster is. Its text leaves the password out."""

    endpoints: tuple[tuple[str, int], ...]
    tls: bool = False
    user: str = ""
    password: str = field(default="", repr=False)

    @property
    def urls(self) -> list[str]:
        scheme = "https" if self.tls else "http"
        return [f"{scheme}://{host}:{port}" for host, port in self.endpoints]

    def __str__(self) -> str:
        return ",".join(f"{host}:{port}" for host, port in self.endpoints)


def parse_etcd_address(text: str) -> EtcdAddress:
    """
    Raises:
        TransferError: the text is not of this form.
    """
    found = _SHAPE.fullmatch(text)
    hosts = [_HOST.fullmatch(part) for part in found["hosts"].split(",")] if found else []
    if not found or not all(hosts):
        raise TransferError(
            f"{_without_password(text)} is not an address of etcd: write "
            "etcd://host:port, or etcd://user:password@host:port,host:port "
            "(etcds:// for TLS)"
        )
    return EtcdAddress(
        tuple((host[1], int(host[2])) for host in hosts if host),
        tls=found["scheme"] == "etcds",
        user=found["user"] or "",
        password=found["password"] or "",
    )


def own_address_towards(address: EtcdAddress) -> str:
    """This host's address on the network on which etcd is reached; nothing is sent.

    Raises:
        TransferError: there is no way there.
    """
    host, port = address.endpoints[0]
    try:
        family, _, _, _, target = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            own: str = probe.getsockname()[0]
    except OSError as error:
        raise TransferError(f"no way to etcd at {host}:{port}: {error}") from error
    return f"[{own}]" if ":" in own else own


def _without_password(text: str) -> str:
    return re.sub(r"//[^@/]*@", "//...@", text)
