"""Media by URL: one fetch for all who ask, kept as HTTP allows, only where permitted.

Sizes, time-outs, retries and redirects are those of vLLM's variables; addresses are
checked before every hop. HTTP itself is vLLM's connection over a session of ours, which
resolves names to permitted addresses only and remembers no cookies.

vLLM names relied on: connections.HTTPConnection (get_async_client, get_async_response),
_async_read_response_bytes, _async_retry, MediaDownloadSizeExceededError;
envs.VLLM_MEDIA_URL_ALLOW_REDIRECTS; exceptions.GracefulHTTPError.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

import aiohttp
import vllm.envs as envs
from vllm.connections import (
    HTTPConnection,
    MediaDownloadSizeExceededError,
    _async_read_response_bytes,
    _async_retry,
)
from vllm.exceptions import GracefulHTTPError
from yarl import URL

from frontend.admission import current_body, let_others_begin
from frontend.media.single_flight import SingleFlight
from frontend.media.url_cache import UrlCache
from frontend.media.url_policy import MediaUnavailable, PolicedResolver, UrlPolicy

MAX_REDIRECTS = 10
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_KEPT_HEADERS = (
    "Age", "Cache-Control", "Date", "ETag", "Expires", "Last-Modified", "Pragma", "Vary",
)


class MediaServerFailed(GracefulHTTPError):
    """The server that media should come from failed: 502, or 504 if it took too long."""


@dataclass(frozen=True)
class _Response:
    status: int
    headers: Mapping[str, str]
    location: str | None
    data: bytes


class RemoteMedia:
    """Fetches media. For one event loop."""

    def __init__(self, policy: UrlPolicy, cache: UrlCache) -> None:
        self._policy = policy
        self._cache = cache
        self._http = _Connection(policy)
        self._flights: SingleFlight[tuple[str, float | None, int | None], bytes] = (
            SingleFlight()
        )

    async def fetch(self, url: str, *, timeout: float | None, max_bytes: int | None) -> bytes:
        """Return the bytes behind a URL.

        ``timeout``: seconds for all redirects together, of one attempt; ``max_bytes``: of
        the body, if that is less than VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB.

        Raises:
            MediaUnavailable: not permitted, not there, or too large.
            MediaServerFailed: the server cannot be reached, fails, or takes too long.
            NotAdmitted: requests under way have no room for it.
        """
        try:
            parsed = URL(url).with_fragment(None)
        except ValueError as error:
            raise MediaUnavailable("Failed to fetch media from URL: Invalid URL") from error
        self._policy.check(parsed)
        let_others_begin()
        try:
            data = await self._flights.do(
                (str(parsed), timeout, max_bytes),
                lambda: self._follow(str(parsed), timeout=timeout, max_bytes=max_bytes),
            )
        except TimeoutError as error:
            raise _failed(HTTPStatus.GATEWAY_TIMEOUT, parsed, "no answer in time") from error
        except aiohttp.ClientResponseError as error:
            if error.status < 500:
                raise MediaUnavailable(
                    f"Failed to fetch media from URL: HTTP {error.status} error"
                ) from error
            raise _failed(HTTPStatus.BAD_GATEWAY, parsed, f"HTTP {error.status}") from error
        except MediaDownloadSizeExceededError as error:
            raise MediaUnavailable(f"Failed to fetch media from URL: {error}") from error
        except (aiohttp.InvalidURL, ValueError) as error:
            raise MediaUnavailable("Failed to fetch media from URL: Invalid URL") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _failed(HTTPStatus.BAD_GATEWAY, parsed, "cannot be reached") from error
        if (body := current_body.get()) is not None:
            body.fetched(len(data))
        return data

    async def close(self) -> None:
        """Close connections that are kept open."""
        await self._http.close()

    # vLLM's retries want the URL first and the time-out by name, and lengthen the latter.
    @_async_retry
    async def _follow(
        self, address: str, *, timeout: float | None, max_bytes: int | None
    ) -> bytes:
        url = URL(address)
        async with asyncio.timeout(timeout):
            for _ in range(MAX_REDIRECTS + 1):
                response = await self._get(url, timeout, max_bytes)
                if response.location is None:
                    return response.data
                if not envs.VLLM_MEDIA_URL_ALLOW_REDIRECTS:
                    raise MediaUnavailable("The URL redirects, which is not allowed here.")
                url = _next(url, response.location)
        raise MediaUnavailable(f"The URL redirects more than {MAX_REDIRECTS} times.")

    async def _get(
        self, url: URL, timeout: float | None, max_bytes: int | None
    ) -> _Response:
        """One hop; redirects are never kept, what they lead to is kept as if asked for."""
        self._policy.check(url)
        key = str(url)
        stored = self._cache.get(key)
        if stored is not None and self._cache.is_fresh(stored):
            self._cache.stats.hits += 1
            return _Response(200, stored.headers, None, _within(stored.data, max_bytes))
        conditions = stored.conditions if stored is not None else {}
        try:
            response = await self._http.get(key, timeout, conditions, max_bytes)
        except aiohttp.ClientResponseError as error:
            if error.status < 500:
                self._cache.drop(key)  # gone, or no longer for us
            raise
        if stored is not None and response.status == HTTPStatus.NOT_MODIFIED:
            self._cache.stats.renewed += 1
            self._cache.renew(key, stored, response.headers)
            return _Response(200, stored.headers, None, _within(stored.data, max_bytes))
        self._cache.stats.misses += response.location is None
        if response.status == HTTPStatus.OK and not url.user and not url.password:
            self._cache.put(key, response.data, response.headers)
        else:
            self._cache.drop(key)
        return response


class _Connection(HTTPConnection):
    """vLLM's connection, one hop at a time."""

    def __init__(self, policy: UrlPolicy) -> None:
        super().__init__()
        self._policy = policy

    async def get_async_client(self) -> aiohttp.ClientSession:
        if self._async_client is None:
            self._async_client = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(resolver=PolicedResolver(self._policy)),
                # A cookie given to one must not open doors for another.
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=True,
            )
        return self._async_client

    async def get(
        self,
        url: str,
        timeout: float | None,
        headers: Mapping[str, str],
        max_bytes: int | None,
    ) -> _Response:
        """Ask once; 4xx and 5xx raise ``aiohttp.ClientResponseError``."""
        async with await self.get_async_response(
            url, timeout=timeout, extra_headers=headers, allow_redirects=False
        ) as response:
            response.raise_for_status()
            location = response.headers.get("Location")
            redirects = response.status in _REDIRECTS and location is not None
            return _Response(
                response.status,
                {
                    name: ", ".join(response.headers.getall(name))
                    for name in _KEPT_HEADERS
                    if name in response.headers
                },
                location if redirects else None,
                b"" if redirects else await _async_read_response_bytes(response, max_bytes),
            )

    async def close(self) -> None:
        if self._async_client is not None:
            await self._async_client.close()
            self._async_client = None


def _next(url: URL, location: str) -> URL:
    """Where a redirect leads; user and password go along only to the same server."""
    target = url.join(URL(location)).with_fragment(None)
    if target.origin() == url.origin() and target.user is None and url.user is not None:
        return target.with_user(url.user).with_password(url.password)
    return target


def _within(data: bytes, max_bytes: int | None) -> bytes:
    if max_bytes is not None and len(data) > max_bytes:
        raise MediaDownloadSizeExceededError(max_bytes, len(data))
    return data


def _failed(status: HTTPStatus, url: URL, reason: str) -> MediaServerFailed:
    return MediaServerFailed(f"Failed to fetch media from {url.host}: {reason}", status)
