"""One keep-alive HTTP connection to a server of this machine."""

from __future__ import annotations

import http.client
import json
from types import TracebackType
from typing import Any

REQUEST_SECONDS = 120.0


class BadAnswer(Exception):
    """A server answered with something else than success."""


class Client:
    """Sends one request at a time over one connection. Not for several threads."""

    def __init__(self, port: int, timeout: float = REQUEST_SECONDS) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)

    def get(self, path: str) -> Any:
        """Raises: BadAnswer, OSError, http.client.HTTPException."""
        return self._exchange("GET", path, None)

    def post(self, path: str, body: bytes = b"") -> Any:
        """Send ``body``, which is JSON.

        Raises:
            BadAnswer, OSError, http.client.HTTPException: there is no good answer.
        """
        return self._exchange("POST", path, body)

    def _exchange(self, method: str, path: str, body: bytes | None) -> Any:
        headers = {"Content-Type": "application/json"} if body else {}
        self._connection.request(method, path, body, headers)
        response = self._connection.getresponse()
        text = response.read()
        if response.status != 200:
            raise BadAnswer(f"{method} {path}: {response.status} {text[:300]!r}")
        return json.loads(text) if text else None

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
