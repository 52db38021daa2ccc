"""One family behind Foveal, by every way of transfer, against what plain vLLM answered."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.answers import differences
from tests.e2e.cases import CHAT
from tests.e2e.fleet import Deployment, Frontend
from tests.e2e.processes import wait_until
from tests.e2e.reuse import Reuse, reuse_of
from tests.families.questions import SEEDS, TEXT, questions, twins
from tests.families.table import Family

Answers = Mapping[str, Any]


@dataclass
class Cell:
    """What was found for one family, kind of media and way of transfer."""

    family: str
    column: str
    transfer: str
    differing: list[str] = field(default_factory=list)
    """Where answers were not plain vLLM's."""
    misjudged: list[str] = field(default_factory=list)
    """Requests whose promised overlap was not what the engine took from its cache."""
    strayed: list[str] = field(default_factory=list)
    """Requests whose tensors did not go as asked for."""
    cached_tokens: int = 0
    """Of repeated requests: what the engine took from its cache."""
    reusable_tokens: int = 0
    """Of repeated requests: all full blocks before the last token."""

    @property
    def faults(self) -> list[str]:
        return self.differing + self.misjudged + self.strayed

    def as_record(self) -> dict[str, Any]:
        """What of it goes into the table of docs/models.md."""
        return {
            "exact": not self.differing,
            "overlap": not self.misjudged,
            "by_reference": not self.strayed,
            "cached_tokens": self.cached_tokens,
            "reusable_tokens": self.reusable_tokens,
        }


class FamilyFleet:
    """One worker, and a frontend for each way of transfer."""

    def __init__(self, family: Family, checkpoint: Path, logs: Path) -> None:
        self.family = family
        self.deployment = Deployment(checkpoint, logs)
        start = self.deployment.start_frontend
        trust = ("--trust-remote-code",) if family.own_code else ()
        flags = [
            flag
            for name, value in family.engine.items()
            for flag in (f"--{name.replace('_', '-')}", str(value))
        ]
        try:
            self.worker = self.deployment.start_worker(*trust, *flags)
            # Only one has a preprocess process: each takes as long to start as a frontend.
            self.frontends: Mapping[str, Frontend] = {
                transfer: start(
                    *trust, "--mm-transfer", transfer,
                    "--mm-preprocess-workers", str(int(transfer == "shm")),
                    name=transfer,
                )
                for transfer in SEEDS
            }
            self.deployment.await_ready(list(self.frontends.values()), workers=1)
        except BaseException:
            self.deployment.end()
            raise

    def end(self) -> None:
        self.deployment.end()

    def check(self, column: str, transfer: str, expected: Answers) -> Cell:
        """Ask everything about one kind of media, each twice, by one way of transfer."""
        cell = Cell(self.family.name, column, transfer)
        frontend = self.frontends[transfer]
        _settle(frontend)
        for question in questions(self.family, column, transfer):
            response = frontend.ask(CHAT, question.body)
            cell.differing += [
                f"{question.key}: {difference}"
                for difference in differences(_plain(response), expected[question.key])
            ]
            sent = response.headers["x-foveal-transfer"]
            if sent != ("none" if column == TEXT else transfer):
                cell.strayed.append(f"{question.key}: {sent}")
            first = reuse_of(response)
            _settle(frontend)
            again = reuse_of(frontend.ask(CHAT, {**question.body, "max_tokens": 1}))
            cell.misjudged += [_misjudged(question.key, reuse) for reuse in (first, again)]
            cell.cached_tokens += again.cached_tokens
            cell.reusable_tokens += again.reusable_tokens
            _settle(frontend)
        cell.misjudged = list(filter(None, cell.misjudged))
        return cell


def tells_apart(column: str, expected: Answers) -> bool:
    """Whether plain vLLM's answers depend on what it is shown."""
    one, other = (expected[question.key] for question in twins(column))
    return bool(differences(one, other))


def _plain(response: httpx.Response) -> dict[str, Any]:
    """An answer as ``plain_vllm`` writes it."""
    answer = response.json()
    [choice] = answer["choices"]
    return {
        "prompt_tokens": answer["usage"]["prompt_tokens"],
        "token_ids": choice["token_ids"],
        "logprobs": [
            [step["logprob"], *sorted(each["logprob"] for each in step["top_logprobs"])]
            for step in choice["logprobs"]["content"]
        ],
    }


def _misjudged(key: str, reuse: Reuse) -> str:
    if reuse.overlap_tokens == reuse.cached_tokens:
        return ""
    return f"{key}: promised {reuse.overlap_tokens} tokens, cached {reuse.cached_tokens}"


def _settle(frontend: Frontend) -> None:
    """Wait until the frontend has all that the worker has published."""
    wait_until(
        lambda: all(worker["kv_caught_up"] for worker in frontend.workers().values()),
        10.0, "KV events",
    )
    frontend.settle()


def read_answers(directory: Path, family: Family) -> Answers:
    answers: Answers = json.loads((directory / f"{family.name}.json").read_text())
    return answers
