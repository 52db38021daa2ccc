"""Work in flight per worker, charged when a request is routed.

Charging at the decision, not when the worker reports, is what spreads a burst: every
request of it sees the ones before.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What one worker has been given and has not finished."""

    requests: int = 0
    prefill_tokens: int = 0
    """Prompt tokens still to be computed, of requests without a first token."""
    blocks: int = 0
    """KV blocks that the prompts in flight occupy."""


_IDLE = WorkerLoad()


@dataclass(slots=True)
class _Charge:
    worker: str
    prefill_tokens: int
    blocks: int


@dataclass(slots=True)
class _Account:
    prefill_tokens: int = 0
    blocks: int = 0
    request_ids: dict[str, None] = field(default_factory=dict)


class LoadBook:
    """Adds up charges; a request that is unknown or already finished changes nothing."""

    def __init__(self) -> None:
        self._charges: dict[str, _Charge] = {}
        self._accounts: dict[str, _Account] = {}

    def __len__(self) -> int:
        """Count the requests in flight."""
        return len(self._charges)

    def charge(self, worker: str, request_id: str, prefill_tokens: int, blocks: int) -> None:
        """Charge a request to ``worker``, instead of where it was charged before."""
        self.finish(request_id)
        self._charges[request_id] = _Charge(worker, prefill_tokens, blocks)
        account = self._accounts.setdefault(worker, _Account())
        account.prefill_tokens += prefill_tokens
        account.blocks += blocks
        account.request_ids[request_id] = None

    def first_token(self, request_id: str) -> None:
        """Take the prefill charge away: the prompt has been computed."""
        charge = self._charges.get(request_id)
        if charge is not None:
            self._accounts[charge.worker].prefill_tokens -= charge.prefill_tokens
            charge.prefill_tokens = 0

    def finish(self, request_id: str) -> None:
        """Take all that the request was charged away."""
        charge = self._charges.pop(request_id, None)
        if charge is None:
            return
        account = self._accounts[charge.worker]
        account.prefill_tokens -= charge.prefill_tokens
        account.blocks -= charge.blocks
        del account.request_ids[request_id]
        if not account.request_ids:
            del self._accounts[charge.worker]

    def drop_worker(self, worker: str) -> list[str]:
        """Forget a lost worker; return its requests in the order they were charged."""
        account = self._accounts.pop(worker, None)
        if account is None:
            return []
        for request_id in account.request_ids:
            del self._charges[request_id]
        return list(account.request_ids)

    def load(self, worker: str) -> WorkerLoad:
        """Return what ``worker`` has in flight; an unknown worker has nothing."""
        account = self._accounts.get(worker)
        if account is None:
            return _IDLE
        return WorkerLoad(len(account.request_ids), account.prefill_tokens, account.blocks)
