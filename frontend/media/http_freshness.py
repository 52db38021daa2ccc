"""What a response's headers say about keeping it: the part of RFC 9111 needed here.

A shared cache, and a strict one: nothing is used without asking the server unless the
response says for how long. A guess (as that RFC allows, and libraries make) would outlive
a signed address.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from urllib.request import parse_http_list

_VALIDATORS = {"ETag": "If-None-Match", "Last-Modified": "If-Modified-Since"}
_UPDATED_BY_304 = ("Cache-Control", "Expires", "Date", "Age", "Pragma", *_VALIDATORS)


@dataclass(frozen=True)
class Freshness:
    """How a stored response may be used."""

    seconds: float
    """For how long from its arrival without asking the server; 0: ask every time."""
    conditions: Mapping[str, str]
    """Request headers that ask whether it has changed; empty where that cannot be asked."""


def freshness(headers: Mapping[str, str], now: float | None = None) -> Freshness | None:
    """Read the headers of a 200 response; None: it must not be stored.

    ``headers`` finds names in any case; ``now`` is the time of arrival, seconds since 1970.
    """
    directives = _directives(headers.get("Cache-Control", ""))
    if {"no-store", "private"} & directives.keys() or "*" in headers.get("Vary", ""):
        return None
    conditions = {
        asks: headers[says] for says, asks in _VALIDATORS.items() if says in headers
    }
    seconds = 0.0
    if "no-cache" not in directives:
        now = time.time() if now is None else now
        seconds = max(0.0, _lifetime(headers, directives) - _age(headers, now))
    return Freshness(seconds, conditions) if seconds or conditions else None


def renewed(stored: Mapping[str, str], not_modified: Mapping[str, str]) -> dict[str, str]:
    """The stored headers after a 304 response, which says anew how long they hold."""
    headers = {name: stored[name] for name in (*_UPDATED_BY_304, "Vary") if name in stored}
    # A 304 without an age is fresh from the server, whatever the age had been.
    headers.pop("Age", None)
    return headers | {n: not_modified[n] for n in _UPDATED_BY_304 if n in not_modified}


def _directives(cache_control: str) -> dict[str, str]:
    pairs = (item.partition("=") for item in parse_http_list(cache_control))
    return {name.strip().lower(): value.strip(' "') for name, _, value in pairs}


def _lifetime(headers: Mapping[str, str], directives: Mapping[str, str]) -> float:
    """Seconds for which the response is fresh, from when the server made it."""
    for name in ("s-maxage", "max-age"):
        if name in directives:
            return _seconds(directives[name])
    made, expires = _date(headers.get("Date")), _date(headers.get("Expires"))
    if made is None or expires is None or headers.get("Pragma", "").lower() == "no-cache":
        return 0.0
    return expires - made


def _age(headers: Mapping[str, str], now: float) -> float:
    """Seconds since the server made the response."""
    made = _date(headers.get("Date"))
    return max(_seconds(headers.get("Age", "0")), 0.0 if made is None else now - made)


def _seconds(text: str) -> float:
    return float(text) if text.isdecimal() else 0.0


def _date(text: str | None) -> float | None:
    if not text:
        return None
    try:
        return parsedate_to_datetime(text).timestamp()
    except ValueError:
        return None
