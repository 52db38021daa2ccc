"""One request that was sent to a worker, and the errors it may end with.

vLLM names relied on: EngineCoreRequest; GracefulHTTPError.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from http import HTTPStatus

from vllm.exceptions import GracefulHTTPError
from vllm.v1.engine import EngineCoreRequest

from frontend.resumption import Resumption

NOBODY = ""

_CHILD = re.compile(r"\d+_(.+)")
"""Ids that vLLM's ParentRequest gives to the children of a request with n > 1."""


class NoWorkers(GracefulHTTPError):
    """No worker is ready; vLLM answers 503."""

    def __init__(self, waited: float) -> None:
        super().__init__(
            f"No worker became ready within {waited:.0f} seconds. Please try again later.",
            HTTPStatus.SERVICE_UNAVAILABLE,
        )


class AnswerLost(GracefulHTTPError):
    """The answer was lost with its worker; vLLM answers 503, or says so in the stream."""

    def __init__(self, why: str) -> None:
        super().__init__(
            "The worker that computed this answer was lost, and the answer could not go on "
            f"elsewhere: {why}. Please send the request again.",
            HTTPStatus.SERVICE_UNAVAILABLE,
        )


@dataclass
class SentRequest:
    """A request that a worker has. Keeps its tensors in place as long as it lives."""

    request: EngineCoreRequest
    """As it came."""
    worker: str
    """Who has it, or NOBODY while it waits for one."""
    computed: bool = False
    """Whether that worker has computed its prompt."""
    answered: list[int] = field(default_factory=list)
    """The tokens that have come back."""
    resumption: Resumption | None = None
    """How it goes on, if a worker was lost after the first of them."""
    aborted: bool = False
    in_parts: bool = False
    """Whether its input streams in."""
    unrepeatable: str = ""
    """What came with its tokens that cannot be had for some of them only."""
    parts: list[EngineCoreRequest] = field(default_factory=list)
    """What its worker was sent of it, kept for the tensors."""
    tries: set[str] = field(default_factory=set)
    """Workers it was sent to."""
    losses: int = 0
    """Workers that were lost with it, those left out that had said they would leave."""


def family_of(request_id: str) -> str | None:
    """The parent's id, if this is a child of a request with n > 1."""
    child = _CHILD.fullmatch(request_id)
    return child[1] if child else None


def num_tokens_of(request: EngineCoreRequest) -> int:
    """Tokens of its prompt, or embeddings in their place."""
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids)
    return 0 if request.prompt_embeds is None else int(request.prompt_embeds.shape[0])
