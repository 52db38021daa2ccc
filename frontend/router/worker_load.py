"""Work in flight per worker: this frontend's own, and what the workers say of others'.

Own requests are charged when they are routed. Charging at the decision, not when the
worker reports, is what spreads a burst: every request of it sees the ones before. What
other frontends have in flight comes from the workers' reports, which tell it by frontend,
so that nothing is counted twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from transfer.messages import LoadReport


class WorkerLoad(NamedTuple):
    """What one worker has been given and has not finished."""

    requests: int = 0
    prefill_tokens: int = 0
    """Work until the first token of requests that have none, in prompt tokens."""
    blocks: int = 0
    """KV blocks that the prompts in flight occupy."""
    engine_blocks: int = 0
    """KV blocks that requests hold by the engine's own count, answers included."""


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
        self._others: dict[str, WorkerLoad] = {}
        self._sums: dict[str, WorkerLoad] = {}
        """What ``load`` returned since the worker's load last changed."""

    def __len__(self) -> int:
        """Count this frontend's requests in flight."""
        return len(self._charges)

    def charge(self, worker: str, request_id: str, prefill_tokens: int, blocks: int) -> None:
        """Charge a request to ``worker``, instead of where it was charged before."""
        self.finish(request_id)
        self._charges[request_id] = _Charge(worker, prefill_tokens, blocks)
        account = self._accounts.setdefault(worker, _Account())
        account.prefill_tokens += prefill_tokens
        account.blocks += blocks
        account.request_ids[request_id] = None
        self._sums.pop(worker, None)

    def first_token(self, request_id: str) -> None:
        """Take the prefill charge away: the prompt has been computed."""
        charge = self._charges.get(request_id)
        if charge is not None:
            self._accounts[charge.worker].prefill_tokens -= charge.prefill_tokens
            charge.prefill_tokens = 0
            self._sums.pop(charge.worker, None)

    def finish(self, request_id: str) -> None:
        """Take all that the request was charged away."""
        charge = self._charges.pop(request_id, None)
        if charge is None:
            return
        self._sums.pop(charge.worker, None)
        account = self._accounts[charge.worker]
        account.prefill_tokens -= charge.prefill_tokens
        account.blocks -= charge.blocks
        del account.request_ids[request_id]
        if not account.request_ids:
            del self._accounts[charge.worker]

    def report(self, worker: str, report: LoadReport, own_name: str) -> None:
        """Take over what a worker says of the frontends other than ``own_name``."""
        self._sums.pop(worker, None)
        others = [share for name, share in report.shares.items() if name != own_name]
        load = WorkerLoad(
            requests=sum(share.requests for share in others),
            prefill_tokens=sum(share.prefill_tokens for share in others),
            blocks=sum(share.blocks for share in others),
            engine_blocks=report.kv_blocks,
        )
        if load == _IDLE:
            self._others.pop(worker, None)
        else:
            self._others[worker] = load

    def drop_worker(self, worker: str) -> list[str]:
        """Forget a lost worker; return its requests in the order they were charged."""
        self._others.pop(worker, None)
        self._sums.pop(worker, None)
        account = self._accounts.pop(worker, None)
        if account is None:
            return []
        for request_id in account.request_ids:
            del self._charges[request_id]
        return list(account.request_ids)

    def charged(self, request_id: str) -> WorkerLoad:
        """Return what a request is charged now; one that is unknown is charged nothing."""
        charge = self._charges.get(request_id)
        if charge is None:
            return _IDLE
        return WorkerLoad(1, charge.prefill_tokens, charge.blocks)

    def own(self, worker: str) -> WorkerLoad:
        """Return what this frontend has in flight on ``worker``."""
        account = self._accounts.get(worker)
        if account is None:
            return _IDLE
        return WorkerLoad(len(account.request_ids), account.prefill_tokens, account.blocks)

    def load(self, worker: str) -> WorkerLoad:
        """Return what all frontends have in flight; an unknown worker has nothing."""
        load = self._sums.get(worker)
        if load is None:
            load = self._sum(worker)
            if worker in self._accounts or worker in self._others:
                self._sums[worker] = load
        return load

    def loads(self, workers: Sequence[str]) -> list[WorkerLoad]:
        """Do so for several workers."""
        sums = self._sums
        return [sums.get(worker) or self.load(worker) for worker in workers]

    def _sum(self, worker: str) -> WorkerLoad:
        own, others = self.own(worker), self._others.get(worker)
        if others is None:
            return own
        return WorkerLoad(
            own.requests + others.requests,
            own.prefill_tokens + others.prefill_tokens,
            own.blocks + others.blocks,
            others.engine_blocks,
        )
