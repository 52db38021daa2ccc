"""What of a prompt was reused: by the frontend's word and by the engine's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from tests.e2e.cases import CHAT
from tests.e2e.fleet import BLOCK_SIZE, Frontend
from tests.e2e.processes import wait_until


@dataclass(frozen=True)
class Reuse:
    """One answered request."""

    worker: str
    overlap_tokens: int
    """What the frontend found, before the request was sent."""
    cached_tokens: int
    """What the engine took from its cache."""
    prompt_tokens: int

    @property
    def reusable_tokens(self) -> int:
        """Full blocks of the prompt, less the one that holds its last token."""
        return (self.prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


def reuse_of(response: httpx.Response) -> Reuse:
    usage = response.json()["usage"]
    details = usage["prompt_tokens_details"] or {}
    return Reuse(
        worker=response.headers["x-foveal-worker"],
        overlap_tokens=int(response.headers["x-foveal-overlap-blocks"]) * BLOCK_SIZE,
        cached_tokens=details.get("cached_tokens") or 0,
        prompt_tokens=usage["prompt_tokens"],
    )


def ask_and_settle(frontend: Frontend, body: Mapping[str, Any], path: str = CHAT) -> Reuse:
    """Ask for one token, and wait until the frontend knows what the worker holds since.

    One token, so that only blocks of the prompt are computed.
    """
    before = {name: worker["kv_seq"] for name, worker in frontend.workers().items()}
    reuse = reuse_of(frontend.ask(path, {**body, "max_tokens": 1}))
    if reuse.cached_tokens < reuse.reusable_tokens:
        # New blocks were computed, so news of them must come.
        wait_until(
            lambda: frontend.workers()[reuse.worker]["kv_seq"] > before[reuse.worker],
            10.0,
            f"KV events of {reuse.worker}",
        )
    frontend.settle()
    return reuse
