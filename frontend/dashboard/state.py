"""What the dashboard shows: the fleet and the last requests of this process, as plain data.

It is put together when somebody looks, at most twice a second however many look.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from frontend.engine_client import RoutedEngineClient
    from frontend.request_log import RequestRecord

FRESH_SECONDS = 0.5
"""How old an answer may be that is given again."""

SHOWN_FACTS = ("engine", "model", "vllm_version", "block_size", "num_kv_blocks")


class FrontendState:
    """Describes one frontend process."""

    def __init__(self, client: RoutedEngineClient, number: int, thumbnails: bool) -> None:
        self._client = client
        self._number = number
        self._thumbnails = thumbnails
        self._made = float("-inf")
        self._latest = b""

    def encoded(self) -> bytes:
        """The state as JSON."""
        now = time.monotonic()
        if now - self._made >= FRESH_SECONDS:
            self._latest = msgspec.json.encode(self.describe())
            self._made = now
        return self._latest

    def describe(self) -> dict[str, Any]:
        client = self._client
        fleet = client.describe()
        for worker in fleet["workers"]:
            facts = worker.pop("facts") or {}
            worker["facts"] = {name: facts[name] for name in SHOWN_FACTS if name in facts}
            worker["reuse"] = client.log.reuse_of(worker["id"])
            worker["kv_behind"] = client.router.plane.behind(worker["id"])
        return {
            "frontend": self._number,
            "now": time.time(),
            "thumbnails": self._thumbnails,
            **fleet,
            "log": [self._shown(record) for record in reversed(client.log.last)],
        }

    def picture(self, number: int, index: int) -> bytes | None:
        """The encoded picture ``index`` of request ``number``, if it is still here."""
        for record in self._client.log.last:
            if record.number == number and 0 <= index < len(record.pictures):
                return record.pictures[index]
        return None

    @staticmethod
    def _shown(record: RequestRecord) -> dict[str, Any]:
        return {
            "number": record.number,
            "id": record.request_id,
            "adapter": record.adapter,
            "arrived": record.arrived,
            "prompt_tokens": record.prompt_tokens,
            "items": record.items,
            "pictures": len(record.pictures),
            "worker": record.worker,
            "transfer": record.transfer,
            "block_size": record.block_size,
            "overlap_tokens": record.overlap_tokens,
            "promised_tokens": record.promised_blocks * record.block_size,
            "cached_tokens": record.cached_tokens,
            "cost": record.cost,
            "alternatives": [
                {
                    "worker": other.worker,
                    "cost": other.cost,
                    "overlap_tokens": other.overlap_blocks * record.block_size,
                    "promised_tokens": other.promised_blocks * record.block_size,
                    "image_tokens": other.image_tokens,
                }
                for other in record.alternatives
            ],
            "decision_seconds": record.decision_seconds,
            "moves": record.moves,
            "first_token_seconds": record.first_token_seconds,
            "seconds": record.seconds,
            "outcome": record.outcome,
        }
