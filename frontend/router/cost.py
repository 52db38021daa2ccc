"""What it costs to run a request on a worker, and which worker it therefore goes to.

The unit is the time of one prompt token's prefill, "tokens" for short. For one worker:

    own     = max(0, num_tokens - credited)      prompt tokens it must compute for this
    waiting = max(0, queued - promised)          prompt tokens queued before this
    held    = blocks held * block size * 0.1     what the answers in flight slow it down
    cost    = prefill_load_scale * own + waiting + held

``credited`` counts the tokens of blocks that the worker holds or has been promised, times
``overlap_score_credit``. A promised block is still being computed there, so its tokens
stand in the queue: waiting for them is no extra work, which is why they are taken out of
it. So a second request with the same unseen prefix follows the first, until what is held
there outweighs computing the prefix once more elsewhere.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from frontend.router.worker_load import WorkerLoad

# A token in the cache of an answer in flight is read again at each decode step, which is
# far cheaper than computing it. The weight is an estimate, not a measurement.
HELD_TOKEN_COST = 0.1


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """How costs are weighed and what is done with them."""

    overlap_score_credit: float = 1.0
    """How much of a block already held counts as computed: 0 ignores the caches."""
    prefill_load_scale: float = 1.0
    """Weight of the prompt tokens still to be computed against the load of a worker."""
    temperature: float = 0.0
    """0 takes the cheapest worker; above, dearer ones are drawn too, as by softmax."""
    promise_seconds: float = 2.0
    """How long a routed prompt counts as held before the worker's events say so."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that could take the request, and what that would cost."""

    worker: str
    cost: float
    """In tokens of prefill."""
    overlap_blocks: int = 0
    promised_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """The candidate taken, and how many others were as good."""

    candidate: Candidate
    tied: int


def cost_of(
    num_tokens: int,
    overlap_blocks: int,
    promised_blocks: int,
    load: WorkerLoad,
    block_size: int,
    settings: RouterSettings,
) -> float:
    """Return the cost of the request on a worker, in tokens of prefill.

    ``overlap_blocks`` are leading blocks that the worker holds; ``promised_blocks`` are
    those behind them that it is about to hold.
    """
    credit = block_size * settings.overlap_score_credit
    own = max(0.0, num_tokens - (overlap_blocks + promised_blocks) * credit)
    waiting = max(0.0, load.prefill_tokens - promised_blocks * credit)
    held = load.blocks * block_size * HELD_TOKEN_COST
    return settings.prefill_load_scale * own + waiting + held


def choose(
    candidates: Sequence[Candidate],
    temperature: float,
    rng: random.Random,
    rotation: int,
) -> Choice:
    """Take the cheapest candidate; ``rotation`` says which one of equally cheap ones.

    With a temperature, draw one instead: the costs, divided by their spread and by the
    temperature, are the negated logits of a softmax, as in NVIDIA Dynamo.

    Raises:
        ValueError: there are no candidates.
    """
    if not candidates:
        raise ValueError("there is no worker to choose from")
    lowest = min(candidate.cost for candidate in candidates)
    highest = max(candidate.cost for candidate in candidates)
    if temperature > 0 and highest > lowest:
        unit = (highest - lowest) * temperature
        weights = [math.exp((lowest - candidate.cost) / unit) for candidate in candidates]
        return Choice(rng.choices(candidates, weights)[0], tied=0)
    cheapest = [candidate for candidate in candidates if candidate.cost == lowest]
    return Choice(cheapest[rotation % len(cheapest)], tied=len(cheapest) - 1)
