"""One worker as a frontend sees it, and who is told of what becomes of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from transfer.link import FrontendLink, KvSubscriber
from transfer.messages import Frame, KvDelta, LoadReport, Message, WorkerFacts
from transfer.process import Process, wants_to_run
from transfer.process_watch import ProcessWatch
from transfer.registry import WorkerRecord

SILENT_SECONDS = 2.5
"""A worker that has not answered for this long is lost, ..."""
SILENT_SECONDS_STARVED = 15.0
"""... unless its process is on this host and wants to run: then it only lacks a processor."""


class PoolEvents(Protocol):
    """Who is told about workers."""

    async def prepare(self, worker: Worker) -> None:
        """Called with a worker that has just answered, before it gets requests."""

    def on_lost(self, worker: Worker) -> None:
        """Called when a worker cannot be reached any more; it may still be running."""

    def on_gone(self, name: str) -> None:
        """Called when it is not: its process has ended, or it has withdrawn."""

    def on_message(
        self, worker: Worker, message: Message, payload: Sequence[Frame]
    ) -> None: ...
    def on_delta(self, worker: Worker, delta: KvDelta) -> None: ...
    def on_report(self, worker: Worker, report: LoadReport) -> None: ...


class Worker:
    """One worker as this frontend sees it."""

    def __init__(self, address: str, link: FrontendLink) -> None:
        self.address = address
        self.link = link
        self.record: WorkerRecord | None = None
        """What discovery says of it."""
        self.name = address
        """Its own name once it has answered."""
        self.facts: WorkerFacts | None = None
        self.ready = False
        """Whether it has been brought up to date and can be reached."""
        self.draining = False
        """Whether it has said that it is going to leave."""
        self.refused = ""
        self.listed = True
        """Whether discovery names it, or a flag."""
        self.epoch = ""
        self.lost = asyncio.Event()
        """Set once it is lost; another one for each epoch."""
        self.transfer = "inline"
        self.transfer_reason = ""
        self.nixl = False
        """Whether it works with NIXL, and this deployment allows it."""
        self.last_heard = time.monotonic()
        self.greetings = 0
        """Sent since it was heard last."""
        self.kv: KvSubscriber | None = None
        self.process: Process | None = None
        """What it says of itself."""
        self.process_watch: ProcessWatch | None = None
        self.tasks: list[asyncio.Task[None]] = []

    @property
    def encodes(self) -> bool:
        """Whether it only encodes images, and so answers no requests."""
        return self.facts is not None and self.facts.role == "encode"

    def is_silent(self, now: float) -> bool:
        """Whether it should have answered by ``now``."""
        silent = now - self.last_heard
        if silent <= SILENT_SECONDS:
            return False
        return silent > SILENT_SECONDS_STARVED or not self._is_starved()

    def _is_starved(self) -> bool:
        process = self.process
        return process is not None and process.is_local() and wants_to_run(process.pid)

    def close(self) -> None:
        """Close the lines to it and whatever watches it."""
        self.link.close()
        if self.kv is not None:
            self.kv.close()
        if self.process_watch is not None:
            self.process_watch.close()

    def describe(self) -> dict[str, Any]:
        """What ``GET /v1/fleet`` shows of it."""
        return {
            "id": self.name,
            "address": self.address,
            "ready": self.ready,
            "draining": self.draining,
            "refused": self.refused or None,
            "transfer": self.transfer if self.ready else None,
            "transfer_reason": self.transfer_reason or None,
            "facts": msgspec.to_builtins(self.facts) if self.facts else None,
        }
