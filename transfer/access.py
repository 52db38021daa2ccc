"""Who may open a connection over TCP: CurveZMQ, which authenticates and encrypts.

A directory of keys holds two pairs, made by ``python -m transfer.make_keys``. Workers have
one and frontends the other; each side is given the whole of its own pair and the public
half of the other's. A worker lets in only who holds the frontends' secret key, a frontend
speaks only to who holds the workers'. Both planes, requests and KV, go by the same rule.

Sockets in the registry directory (ipc) are not concerned: the file system guards them.
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISVTX
from typing import Any

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from transfer.errors import BadKeys, TransferError

WORKERS, FRONTENDS = "worker", "frontend"
"""The two pairs: ``<name>.key`` is public, ``<name>.key_secret`` holds both halves."""

_DOMAIN = "foveal"


@dataclass(frozen=True)
class CurveKeys:
    """What one side needs: its own pair, and whom it speaks to. Z85, 40 bytes each."""

    public: bytes
    secret: bytes = field(repr=False)
    peer: bytes


@dataclass(frozen=True)
class Access:
    """How sockets of this process are protected on TCP."""

    keys: CurveKeys | None = None
    insecure: bool = False
    """Whether a socket may be open to other hosts without keys."""

    def check(self, address: str) -> None:
        """
        Raises:
            TransferError: other hosts could reach ``address``, and nothing would keep
                them out.
        """
        is_tcp = address.startswith("tcp://")
        if is_tcp and self.keys is None and not self.insecure and not _is_loopback(address):
            raise TransferError(
                f"{address} can be reached from other hosts: give --secure-keys (see "
                "python -m transfer.make_keys), or --insecure on a network where everybody "
                "may read prompts and send requests"
            )

    def before_bind(self, socket: zmq.Socket[bytes], address: str) -> None:
        """Let in only who holds the peer's secret key, where ``address`` is TCP.

        Raises:
            TransferError: as ``check``.
        """
        self.check(address)
        if self.keys is None or not address.startswith("tcp://"):
            return
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.keys.secret)
        # Without an authenticator libzmq would let in whoever knows the public key.
        socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def before_connect(self, socket: zmq.Socket[bytes], address: str) -> None:
        """Speak only to who holds the peer's secret key, where ``address`` is TCP."""
        if self.keys is not None and address.startswith("tcp://"):
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self.keys.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self.keys.secret)
            socket.setsockopt(zmq.CURVE_SERVERKEY, self.keys.peer)


class Authenticator:
    """Answers libzmq's question who may come in, for all bound sockets of a context.

    Make it before they are bound; close it before the context is ended. Without keys it
    does nothing.
    """

    def __init__(self, context: zmq.Context[Any], access: Access) -> None:
        self._authenticator: ThreadAuthenticator | None = None
        if access.keys is not None:
            self._authenticator = ThreadAuthenticator(context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback(_DOMAIN, _Only(access.keys.peer))

    def close(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None


class _Only:
    """Lets in the holders of one key."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._key


def worker_access(directory: Path | None, *, insecure: bool = False) -> Access:
    """How a worker's sockets are protected, by the keys in ``directory`` if any.

    Raises:
        BadKeys: the keys are missing, no keys, or can be read by others.
    """
    return Access(_load(directory, WORKERS, FRONTENDS), insecure)


def frontend_access(directory: Path | None) -> Access:
    """How a frontend's sockets are protected, by the keys in ``directory`` if any.

    Raises:
        BadKeys: as ``worker_access``.
    """
    return Access(_load(directory, FRONTENDS, WORKERS))


def make_keys(directory: Path) -> list[Path]:
    """Make both pairs in a new or empty directory, and return the files.

    The directory gets mode 0700 and the files 0600.

    Raises:
        BadKeys: something is there already, or it cannot be written.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.chmod(0o700)
        if any(directory.iterdir()):
            raise BadKeys(f"{directory} is not empty: keys are not overwritten")
        made = [
            Path(path)
            for name in (WORKERS, FRONTENDS)
            for path in zmq.auth.create_certificates(directory, name)
        ]
        for path in made:
            path.chmod(0o600)
    except OSError as error:
        raise BadKeys(f"cannot make keys in {directory}: {error}") from error
    return made


def _load(directory: Path | None, own: str, other: str) -> CurveKeys | None:
    if directory is None:
        return None
    path = directory / f"{own}.key_secret"
    try:
        status = path.stat()
        public, secret = zmq.auth.load_certificate(path)
        peer, _ = zmq.auth.load_certificate(directory / f"{other}.key")
    except (OSError, ValueError) as error:
        raise BadKeys(
            f"no keys in {directory} ({error}): make them with python -m transfer.make_keys"
        ) from error
    if status.st_mode & 0o077 or status.st_uid != os.getuid():
        raise BadKeys(f"{path} must belong to this user with mode 0600")
    for place in (directory, directory / f"{other}.key"):
        # Whoever puts another public key there decides who is let in.
        if (mode := place.stat().st_mode) & 0o022 and not mode & S_ISVTX:
            raise BadKeys(f"{place} can be changed by other users: take that from them")
    if secret is None or {len(public), len(secret), len(peer)} != {40}:
        raise BadKeys(f"{directory} does not hold keys of python -m transfer.make_keys")
    return CurveKeys(public, secret, peer)


def _is_loopback(address: str) -> bool:
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # every address, or the name of an interface or a host
