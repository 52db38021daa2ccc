"""What a running frontend says of itself and its workers (``GET /v1/fleet``)."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from rich.table import Table

SECONDS = 5.0


class NoFleet(Exception):
    """There is no answer that describes a fleet; the text says why."""


@dataclass(frozen=True)
class FleetState:
    """How far a frontend has come."""

    answers: bool
    healthy: bool
    ready: int


def fetch_fleet(url: str, api_key: str = "") -> dict[str, Any]:
    """
    Raises:
        NoFleet: nobody answers there, or not with a fleet.
    """
    url = with_scheme(url)
    try:
        fleet = json.loads(_get(f"{url.rstrip('/')}/v1/fleet", api_key))
    except urllib.error.HTTPError as error:
        hint = ": give the key with --api-key" if error.code in (401, 403) else ""
        raise NoFleet(f"{url} answers {error.code} {error.reason}{hint}") from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        reason = getattr(reason, "strerror", None) or reason
        raise NoFleet(f"no frontend answers at {url}: {reason}") from error
    except ValueError as error:
        raise NoFleet(f"{url} is not the address of a frontend: {error}") from error
    if not isinstance(fleet, dict) or not isinstance(fleet.get("workers"), list):
        raise NoFleet(f"what answers at {url} is not a frontend of Foveal")
    return fleet


def with_scheme(url: str) -> str:
    """``host:port``, as people write it, is an address as well."""
    return url if "://" in url else f"http://{url}"


def look_at(url: str, api_key: str = "") -> FleetState:
    """How far the frontend at ``url`` is; never fails."""
    try:
        fleet = fetch_fleet(url, api_key)
    except NoFleet:
        return FleetState(False, False, 0)
    ready = sum(1 for worker in fleet["workers"] if worker["ready"])
    try:
        _get(f"{url}/health", api_key)
    except (OSError, http.client.HTTPException, ValueError):
        return FleetState(True, False, ready)
    return FleetState(True, True, ready)


def fleet_table(fleet: dict[str, Any]) -> Table:
    """The workers of ``fleet``, one a line.

    What a worker has to do is in requests of this frontend, and in KV blocks and tokens of
    prefill of all frontends.
    """
    title = f"{fleet.get('requests', 0)} requests in flight, routed by "
    table = Table(title=title + str(fleet.get("router_mode", "?")), title_justify="left")
    table.add_column("worker", no_wrap=True)
    table.add_column("state", overflow="fold")
    for name in ("requests", "blocks", "prefill"):
        table.add_column(name, justify="right")
    table.add_column("by")
    for worker in sorted(fleet["workers"], key=lambda worker: str(worker.get("id"))):
        load = worker.get("load") or {}
        table.add_row(
            str(worker.get("id")),
            _state(worker),
            str(worker.get("requests", "")),
            str(load.get("blocks", "")),
            str(load.get("prefill_tokens", "")),
            str(worker.get("transfer") or "-"),
        )
    return table


def _state(worker: dict[str, Any]) -> str:
    if worker.get("ready"):
        return "ready" if worker.get("kv_caught_up") else "ready, KV events catching up"
    refused = worker.get("refused")
    return f"refused: {refused}" if refused else "not ready"


def _get(url: str, api_key: str) -> bytes:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    # No proxy from the environment may stand between the two.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, headers=headers), timeout=SECONDS) as answer:
        body: bytes = answer.read()
        return body
