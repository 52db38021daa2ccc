"""Tokens of answers that are sent whole, kept here until several can go together.

Each token that goes to a frontend has it wake up, decode and count. Where its client waits
for the whole answer, as those do that do not stream, nobody looks at a token before the
last. The first goes at once, because times to first token are measured by it; then what has
come within ``MOST_SECONDS`` goes as one output, as if one step had made it, and the rest
with the end. The frontend thus always knows most of an answer, should it have to go on on
another worker. One that is cut short by ``/abort_requests`` lacks what was held.

Answers whose tokens are looked at are not held: those that stream, those with stop strings,
which the frontend looks for, and outputs with anything but tokens, log-probabilities for
example.

vLLM names relied on: EngineCoreRequest.resumable, SamplingParams.output_kind and stop,
RequestOutputKind; EngineCoreOutput: its fields default to what says nothing, and its
new_token_ids may be several; SchedulerStats: its fields but the gauges named here are of
one step and are summed up.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats

MOST_SECONDS = 0.2
"""Tokens are held for so long and no longer: what a lost worker takes with it."""

GAUGES = {
    "num_running_reqs", "num_waiting_reqs", "num_skipped_waiting_reqs", "kv_cache_usage",
    "num_kv_fetch_reqs_by_stage", "step_counter", "current_wave", "waiting_lora_adapters",
    "running_lora_adapters",
}
"""Statistics of a step that the next step says anew."""

_SAYS_NOTHING = [
    (name, default)
    for name, default in zip(
        EngineCoreOutput.__struct_fields__[-len(EngineCoreOutput.__struct_defaults__) :],
        EngineCoreOutput.__struct_defaults__,
        strict=True,
    )
]
_COUNTED = [
    (name, default)
    for name, default in vars(SchedulerStats()).items()
    if name not in GAUGES
]
_NO_LOOKUPS = PrefixCacheStats()
"""What is counted of a prefix cache, a KV connector's for example, in most steps."""


@dataclass
class HeldTokens:
    """Of one request."""

    sent_at: float | None = None
    """When something was sent last; None before the first token."""
    token_ids: list[int] = field(default_factory=list)


def is_awaited_whole(request: EngineCoreRequest) -> bool:
    """Whether nobody looks at the answer before it is complete."""
    params = request.sampling_params
    return (
        params is not None
        and params.output_kind == RequestOutputKind.FINAL_ONLY
        and not params.stop
        and not request.resumable
    )


def may_be_held(stats: SchedulerStats | None) -> bool:
    """Whether nobody would miss what a step says beside its tokens."""
    return stats is None or all(
        getattr(stats, name) in (default, _NO_LOOKUPS) for name, default in _COUNTED
    )


def hold(held: HeldTokens, output: EngineCoreOutput, now: float) -> bool:
    """Keep the tokens of ``output`` back, if that may be; returns whether it did.

    ``now``: seconds of a clock that does not go back.
    """
    sent = held.sent_at
    if sent is None or now - sent >= MOST_SECONDS or not _is_plain(output):
        return False
    held.token_ids += output.new_token_ids
    return True


def let_go(held: HeldTokens, output: EngineCoreOutput, now: float) -> None:
    """Put what was held before the tokens of ``output``, which is to be sent."""
    output.new_token_ids[:0] = held.token_ids
    held.token_ids.clear()
    held.sent_at = now


def taken_out(held: dict[str, HeldTokens]) -> list[EngineCoreOutput]:
    """Take all that is held, by request, as outputs to be sent."""
    outputs = [EngineCoreOutput(name, each.token_ids) for name, each in held.items()]
    for each in held.values():
        each.token_ids = []
    return [output for output in outputs if output.new_token_ids]


def _is_plain(output: EngineCoreOutput) -> bool:
    """Whether it says nothing but tokens."""
    return all(getattr(output, name) is default for name, default in _SAYS_NOTHING)
