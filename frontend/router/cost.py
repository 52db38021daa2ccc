"""What it costs to run a request on a worker, and which worker it therefore goes to.

The unit is the time of one prompt token's prefill, "tokens" for short. For one worker:

    own     = max(0, num_tokens - credited)      prompt tokens it must compute for this
    encoder = image tokens it must encode for this * encoder_load_scale
    waiting = max(0, queued - promised)          tokens of such work queued before this
    held    = blocks held * block size * 0.1     what the answers in flight slow it down
    crowd   = requests above 1.5 times the mean of all workers, and above 4, * 512
              where blocks that the worker already holds speak for it; above 3, * 1536
              where blocks do that it is still computing

    cost    = prefill_load_scale * (own + encoder) + waiting + held + crowd

``credited`` counts the tokens of blocks that the worker holds or has been promised, times
``overlap_score_credit``. A promised block is still being computed there, so its tokens
stand in the queue: waiting for them is no extra work, which is why they are taken out of
it. The same holds for images that are still being encoded there. So a second request with
the same unseen prefix follows the first, until the crowd there outweighs computing the
prefix once more elsewhere.

``crowd`` bounds how far a prefix that everyone shares can pull: a worker that has more
than its part of the requests is made dearer with each one, until computing the prefix
elsewhere, once, is cheaper. A long conversation is worth more than that and stays. Those
who follow a prefix that is still being computed wait for all of it and then for each other,
in one step, which on an idle worker they would not: so they are a crowd earlier.

Blocks that make less than a twentieth of the prompt are not credited. Else the few that all
chats begin with would draw everything to one worker as long as there is little to do, and
the caches of the others would stay empty.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from frontend.router.worker_load import WorkerLoad

# A token in the cache of an answer in flight is read again at each decode step, which is
# far cheaper than computing it. The weight is an estimate, not a measurement.
HELD_TOKEN_COST = 0.1

# How uneven the requests in flight may be before that alone makes a worker dearer, and
# the price of each request beyond, in tokens of prefill. A few are no crowd, however idle
# the other workers are. The figures are those with which benchmarks.replay finds the caches
# used best without anybody waiting longer than with least-loaded.
EVEN_ENOUGH = 1.5
FEW_REQUESTS = 4
CROWD_TOKENS = 512
FEW_FOLLOWERS = 3
FOLLOWER_TOKENS = 1536

# What share of the prompt is worth going after.
WORTH_FOLLOWING = 0.05


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """How costs are weighed and what is done with them."""

    overlap_score_credit: float = 1.0
    """How much of a block already held counts as computed: 0 ignores the caches."""
    prefill_load_scale: float = 1.0
    """Weight of this request's own work against the load of a worker."""
    temperature: float = 0.0
    """0 takes the cheapest worker; above, dearer ones are drawn too, as by softmax."""
    promise_seconds: float = 2.0
    """How long a routed prompt counts as held before the worker's events say so."""
    encoder_load_scale: float = 0.5
    """Encoding one token of an image, in tokens of prefill. 0: it does not matter who
    has encoded an image before."""


class Candidate(NamedTuple):
    """A worker that could take the request, and what that would cost."""

    worker: str
    cost: float
    """In tokens of prefill."""
    overlap_blocks: int = 0
    promised_blocks: int = 0
    image_tokens: int = 0
    """Placeholder tokens of the images that it must encode."""


class Choice(NamedTuple):
    """The candidate taken, and how many others were as good."""

    candidate: Candidate
    tied: int


class Work(NamedTuple):
    """What a request means to one worker."""

    overlap_blocks: int = 0
    """Leading blocks of the prompt that it holds."""
    promised_blocks: int = 0
    """Those behind them that it is about to hold."""
    image_tokens: int = 0
    """Placeholder tokens of the images that it would have to encode."""
    queued_image_tokens: int = 0
    """Those of images of this request that it is about to encode anyway."""


def costs_of(
    num_tokens: int,
    works: Iterable[tuple[int, int, int, int]],
    loads: Iterable[WorkerLoad],
    block_size: int,
    settings: RouterSettings,
    mean_requests: float = math.inf,
) -> list[float]:
    """Return the cost of the request on each worker, in tokens of prefill.

    ``works`` and ``loads`` are the workers' in the same order, the former with the fields of
    ``Work``. ``mean_requests`` is the mean over all workers of the requests in flight, this
    one included; without it nobody is crowded.
    """
    # Every worker passes here at every decision: one loop, comparisons, no calls of max.
    costs = []
    encoder_scale, prefill_scale = settings.encoder_load_scale, settings.prefill_load_scale
    token_credit = block_size * settings.overlap_score_credit
    worth_following = num_tokens * WORTH_FOLLOWING
    even = EVEN_ENOUGH * mean_requests
    for (overlap, promised, image_tokens, queued_image_tokens), load in zip(
        works, loads, strict=True
    ):
        known = overlap + promised
        credit = token_credit if known * block_size >= worth_following else 0.0
        own = num_tokens - known * credit
        if own < 0.0:
            own = 0.0
        cost = prefill_scale * (own + image_tokens * encoder_scale)
        requests, queued, blocks, engine_blocks = load
        waiting = queued - promised * credit - queued_image_tokens * encoder_scale
        if waiting > 0.0:
            cost += waiting
        held = blocks if blocks > engine_blocks else engine_blocks
        cost += held * block_size * HELD_TOKEN_COST
        if known:
            few, price = (
                (FEW_FOLLOWERS, FOLLOWER_TOKENS)
                if promised
                else (FEW_REQUESTS, CROWD_TOKENS)
            )
            crowd = requests + 1 - (even if even > few else few)
            if crowd > 0:
                cost += crowd * price
        costs.append(cost)
    return costs


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
    if temperature > 0:
        highest = max(candidate.cost for candidate in candidates)
        if highest > lowest:
            unit = (highest - lowest) * temperature
            weights = [math.exp((lowest - candidate.cost) / unit) for candidate in candidates]
            return Choice(rng.choices(candidates, weights)[0], tied=0)
    cheapest = [candidate for candidate in candidates if candidate.cost == lowest]
    return Choice(cheapest[rotation % len(cheapest)], tied=len(cheapest) - 1)
