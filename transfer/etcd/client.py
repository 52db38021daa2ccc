"""The few calls of etcd v3 that discovery needs, over its JSON gateway.

etcd 3.4 or newer serves the gateway under ``/v3`` on its client port. Keys and values are
base64 there, 64-bit numbers are strings, and a watch is a response that does not end, one
JSON object a line. Several endpoints of one cluster may be named: one that does not answer
makes room for the next.
"""

from __future__ import annotations

import base64
import ssl
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from transfer.errors import EtcdUnavailable
from transfer.etcd.address import EtcdAddress

CALL_SECONDS = 2.0
"""How long one endpoint may take to answer, the connection included: less than a lease
leaves time for, so that another endpoint can be asked before it ends."""
LONGEST_LINE = 8 << 20
"""Bytes of one answer of a watch; etcd itself takes requests of 1.5 MiB at most."""


@dataclass(frozen=True)
class Change:
    """One event of a watch; ``value`` is None where the key has gone."""

    key: str
    value: bytes | None


class WatchLost(Exception):
    """A watch has ended: read the keys again and watch from there."""


class EtcdClient:
    """Calls to one etcd cluster. Of one event loop."""

    def __init__(self, address: EtcdAddress) -> None:
        self._address = address
        self._preferred = 0
        self._token = ""
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def grant(self, seconds: int) -> str:
        """A new lease that ends ``seconds`` after it was last kept alive; returns its id."""
        answer = await self._call("/v3/lease/grant", {"TTL": str(seconds)})
        with self._understood():
            return str(answer["ID"])

    async def keep_alive(self, lease: str) -> bool:
        """Renew ``lease``; False where etcd does not know it any more."""
        answer = await self._call("/v3/lease/keepalive", {"ID": lease})
        # One line of a stream: it ends because the stream of requests has ended.
        with self._understood():
            return int(answer.get("result", {}).get("TTL", 0)) > 0

    async def revoke(self, lease: str) -> None:
        """End ``lease`` and remove all keys under it."""
        await self._call("/v3/lease/revoke", {"ID": lease})

    async def put(self, key: str, value: bytes, lease: str) -> None:
        """Set ``key`` for as long as ``lease`` lasts.

        Raises:
            EtcdUnavailable: it did not come to that; the lease may be gone, too.
        """
        await self._call(
            "/v3/kv/put", {"key": _text(key), "value": _b64(value), "lease": lease}
        )

    async def delete(self, key: str) -> None:
        await self._call("/v3/kv/deleterange", {"key": _text(key)})

    async def put_if_absent(self, key: str, value: bytes) -> bytes:
        """Set ``key`` unless it is there; returns what it holds then."""
        absent = {
            "key": _text(key), "target": "CREATE", "result": "EQUAL", "create_revision": "0"
        }
        answer = await self._call("/v3/kv/txn", {
            "compare": [absent],
            "success": [{"request_put": {"key": _text(key), "value": _b64(value)}}],
            "failure": [{"request_range": {"key": _text(key)}}],
        })
        with self._understood():
            if answer.get("succeeded"):
                return value
            (found,) = answer["responses"][0]["response_range"]["kvs"]
            return base64.b64decode(found["value"])

    async def read(self, prefix: str) -> tuple[dict[str, bytes], int]:
        """All keys that begin with ``prefix``, and the revision at which they stand so."""
        answer = await self._call("/v3/kv/range", _range(prefix))
        with self._understood():
            found = {
                _key(pair): base64.b64decode(pair.get("value", ""))
                for pair in answer.get("kvs", ())
            }
            return found, int(answer["header"]["revision"])

    async def watch(
        self, prefix: str, revision: int, seconds: float
    ) -> AsyncGenerator[list[Change]]:
        """Yield changes under ``prefix`` that came after ``revision``, for ``seconds``.

        It ends by itself so that a connection that is dead without a word is noticed.

        Raises:
            WatchLost: no more will come: time is up, the connection broke, or
                ``revision`` is too old.
        """
        body = {"create_request": {**_range(prefix), "start_revision": str(revision + 1)}}
        timeout = aiohttp.ClientTimeout(seconds, sock_connect=CALL_SECONDS)
        try:
            async with self._post("/v3/watch", body, timeout) as response:
                async for line in response.content:
                    with self._understood():
                        changes = _changes(line)
                    yield changes
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise WatchLost(str(error) or type(error).__name__) from error
        except EtcdUnavailable as error:
            raise WatchLost(str(error)) from error
        raise WatchLost("etcd closed the connection")

    async def _call(self, path: str, body: Mapping[str, Any]) -> Any:
        """
        Raises:
            EtcdUnavailable: no endpoint answers, or it refuses.
        """
        try:
            async with self._post(path, body, aiohttp.ClientTimeout(CALL_SECONDS)) as response:
                return msgspec.json.decode(await response.read())
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as error:
            reason = str(error) or type(error).__name__
            raise EtcdUnavailable(f"etcd at {self._address}: {reason}") from error

    @contextmanager
    def _understood(self) -> Iterator[None]:
        """Within, an answer is taken apart: what stands there may be no etcd.

        Raises:
            EtcdUnavailable: it is not an answer of etcd's.
        """
        try:
            yield
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise EtcdUnavailable(
                f"etcd at {self._address} answers as no etcd does: {error!r}"
            ) from error

    @asynccontextmanager
    async def _post(
        self, path: str, body: Mapping[str, Any], timeout: aiohttp.ClientTimeout
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        for attempt in ("first", "with a new token"):
            response = await self._send(path, body, timeout)
            async with response:
                if response.status == 200:
                    yield response
                    return
                text = (await response.text())[:300]
            # A token ends after some minutes, and when etcd is started again.
            if "token" not in text or attempt != "first" or not self._address.user:
                raise EtcdUnavailable(f"etcd at {self._address}: {text.strip()}")
            self._token = ""

    async def _send(
        self, path: str, body: Mapping[str, Any], timeout: aiohttp.ClientTimeout
    ) -> aiohttp.ClientResponse:
        """Post to the endpoint that answered last, else to the next that answers."""
        if self._session is None:
            context = ssl.create_default_context() if self._address.tls else None
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=context or True),
                read_bufsize=LONGEST_LINE,
            )
        if self._address.user and not self._token and path != "/v3/auth/authenticate":
            answer = await self._call("/v3/auth/authenticate", {
                "name": self._address.user, "password": self._address.password,
            })
            with self._understood():
                self._token = str(answer["token"])
        urls = self._address.urls
        # Once more around: a connection that was kept may be of an etcd that has ended.
        for offset in range(len(urls) + 1):
            place = (self._preferred + offset) % len(urls)
            try:
                response = await self._session.post(
                    urls[place] + path,
                    data=msgspec.json.encode(body),
                    headers={"Authorization": self._token} if self._token else {},
                    timeout=timeout,
                )
            except (aiohttp.ClientConnectionError, TimeoutError):
                if offset == len(urls):
                    raise
            else:
                self._preferred = place
                return response
        raise AssertionError("an address has one endpoint at least")


def _changes(line: bytes) -> list[Change]:
    message = msgspec.json.decode(line)
    result = message.get("result")
    if result is None or result.get("canceled"):
        raise WatchLost(str(message.get("error") or result.get("cancel_reason") or message))
    return [
        Change(
            _key(event["kv"]),
            None
            if event.get("type") == "DELETE"
            else base64.b64decode(event["kv"].get("value", "")),
        )
        for event in result.get("events", ())
    ]


def _range(prefix: str) -> dict[str, str]:
    """etcd asks for a half-open range: up to the prefix with its last byte one higher."""
    raw = prefix.encode()
    return {"key": _b64(raw), "range_end": _b64(raw[:-1] + bytes([raw[-1] + 1]))}


def _key(pair: Mapping[str, str]) -> str:
    return base64.b64decode(pair["key"]).decode(errors="replace")


def _text(key: str) -> str:
    return _b64(key.encode())


def _b64(value: bytes) -> str:
    return base64.b64encode(value).decode()
