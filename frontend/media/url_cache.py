"""Bytes fetched from URLs, for as long as their servers allow."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from frontend.media.http_freshness import freshness, renewed

_ENTRY_OVERHEAD = 1024
"""Bytes that an entry takes beside its data: address, headers, objects. An estimate."""


@dataclass(frozen=True)
class StoredMedia:
    """A response as it is kept."""

    data: bytes
    headers: Mapping[str, str]
    conditions: Mapping[str, str]
    """Request headers that ask the server whether it still holds."""
    fresh_until: float
    """On the cache's clock."""


@dataclass
class UrlCacheStats:
    """Counted since the start; ``nbytes`` and ``entries`` are of now."""

    hits: int = 0
    """Answered without asking the server."""
    renewed: int = 0
    """Answered after the server said that nothing has changed."""
    misses: int = 0
    nbytes: int = 0
    entries: int = 0


class UrlCache:
    """At most ``capacity`` bytes, least recently used out first. For one event loop.

    The key is the whole URL with its query and its user and password. Nothing else that
    a server could tell people apart by is ever sent (no cookies, no headers of theirs), so
    who can name the URL could fetch it.
    """

    def __init__(
        self, capacity: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``capacity`` in bytes, 0: keep nothing; ``clock`` in seconds, never going back."""
        self._capacity = capacity
        self._clock = clock
        self._stored: OrderedDict[str, StoredMedia] = OrderedDict()
        self.stats = UrlCacheStats()

    def get(self, url: str) -> StoredMedia | None:
        """What is kept for ``url``, fresh or not."""
        stored = self._stored.get(url)
        if stored is not None:
            self._stored.move_to_end(url)
        return stored

    def is_fresh(self, stored: StoredMedia) -> bool:
        """Whether it may be used without asking the server."""
        return self._clock() < stored.fresh_until

    def put(self, url: str, data: bytes, headers: Mapping[str, str]) -> None:
        """Keep the body of a 200 response if its headers, named as in RFC 9110, allow."""
        self.drop(url)
        found = freshness(headers)
        size = _size(url, data)
        if found is None or size > self._capacity:
            return
        self._stored[url] = StoredMedia(
            data, headers, found.conditions, self._clock() + found.seconds
        )
        self.stats.nbytes += size
        while self.stats.nbytes > self._capacity:
            self.drop(next(iter(self._stored)))
        self.stats.entries = len(self._stored)

    def renew(self, url: str, stored: StoredMedia, not_modified: Mapping[str, str]) -> None:
        """Keep ``stored`` longer: the server answered 304, with these headers."""
        self.put(url, stored.data, renewed(stored.headers, not_modified))

    def drop(self, url: str) -> None:
        stored = self._stored.pop(url, None)
        if stored is not None:
            self.stats.nbytes -= _size(url, stored.data)
            self.stats.entries = len(self._stored)


def _size(url: str, data: bytes) -> int:
    return len(data) + len(url) + _ENTRY_OVERHEAD
