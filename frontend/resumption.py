"""How an answer that has begun goes on, on another worker than the one that was lost.

Two ways, both of which the client cannot tell from an answer that nothing happened to:

- continue: the new worker is given the prompt with the answer so far behind it, and fewer
  tokens to go. Right wherever the next token depends on nothing but the tokens before it.
- replay: the new worker is given the request as it was, and the tokens that it gives again
  are swallowed. For requests that remember what they generated (structured output, seeds,
  ...), and only for those that give the same tokens each time. That they did is checked.

What is neither cannot go on: drawn at random, and depending on more than the tokens.

vLLM names relied on: EngineCoreRequest, EngineCoreOutput; SamplingParams and that
logits processors see the prompt and the output of a request apart; LogprobsLists and
SamplingMaskLists.slice_request; that prompt log-probabilities come with the first token.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason

GREEDY_BELOW = 1e-5
"""vLLM takes lower temperatures for 0."""

_BROKEN_OFF = (FinishReason.ABORT, FinishReason.ERROR)


class CannotResume(Exception):
    """A request cannot go on elsewhere; the text says why, for whoever sent it."""


class Resumption:
    """One request on its way on: what is sent, and what comes back."""

    def __init__(self, request: EngineCoreRequest, again: Sequence[int] = ()) -> None:
        """``again``: the tokens that will come once more and are not to be passed on."""
        self.request = request
        self._again = list(again)
        self._seen = 0

    def take(self, output: EngineCoreOutput) -> EngineCoreOutput | None:
        """Return what is new in an output of the new worker; None if nothing is.

        Raises:
            CannotResume: the answer is another one this time.
        """
        # Said once already, with the first token of the answer.
        output.prefill_stats = output.events = None
        output.new_prompt_logprobs_tensors = output.prompt_token_id_logprobs = None
        expected = self._again[self._seen : self._seen + len(output.new_token_ids)]
        count = len(expected)
        if output.new_token_ids[:count] != expected:
            raise CannotResume("another worker answers differently")
        self._seen += count
        remaining = len(output.new_token_ids) - count
        if output.finished and not remaining and output.finish_reason not in _BROKEN_OFF:
            raise CannotResume("another worker ends the answer earlier")
        if count:
            if not remaining and not output.finished:
                return None
            _drop_leading(output, count, remaining)
        return output


def resume(
    request: EngineCoreRequest,
    answered: Sequence[int],
    own_logits_processors: bool = False,
) -> Resumption:
    """Return how ``request`` goes on behind the tokens ``answered``, at least one.

    ``own_logits_processors``: whether its workers have such that are not vLLM's own.

    Raises:
        CannotResume: it cannot.
    """
    params = request.sampling_params
    if params is None:
        raise CannotResume("it is no request for tokens")
    if params.max_tokens is not None and len(answered) >= params.max_tokens:
        raise CannotResume("all its tokens had come, but not its end")
    memories = _memories(request, params)
    if own_logits_processors:
        memories.append("logits processors that are not vLLM's own")
    if not memories:
        return Resumption(_continued(request, params, answered))
    if params.temperature >= GREEDY_BELOW and params.seed is None:
        raise CannotResume(
            f"it is sampled without a seed, with {' and '.join(memories)}; with a seed or "
            "temperature 0 it could"
        )
    return Resumption(request, answered)


def _memories(request: EngineCoreRequest, params: SamplingParams) -> list[str]:
    """What makes the next token depend on more than the tokens before it."""
    found = {
        "structured output": params.structured_outputs is not None,
        "a seed": params.seed is not None and params.temperature >= GREEDY_BELOW,
        # They count generated tokens only. A repetition penalty counts the prompt's too.
        "a presence or frequency penalty": params.presence_penalty != 0
        or params.frequency_penalty != 0,
        # Looked for in what was generated only.
        "bad words of several tokens": any(
            len(word) > 1 for word in params._bad_words_token_ids or ()
        ),
        "a thinking budget": params.thinking_token_budget is not None,
        "repetition detection": params.repetition_detection is not None,
        "a given trace": params.trace_decode_token_ids is not None,
        "extra arguments": bool(params.extra_args),
        "embeddings in the prompt": request.prompt_embeds is not None,
    }
    return [name for name, there in found.items() if there]


def _continued(
    request: EngineCoreRequest, params: SamplingParams, answered: Sequence[int]
) -> EngineCoreRequest:
    count = len(answered)
    further = copy(params)
    if params.max_tokens is not None:
        further.max_tokens = params.max_tokens - count
    further.min_tokens = max(0, params.min_tokens - count)
    # They have been given, and who asks for them may not read the cache.
    further.prompt_logprobs = further.prompt_logprob_token_ids = None
    further.prompt_logprob_start = None
    if params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None:
        further.skip_reading_prefix_cache = False
    continued = copy(request)
    continued.sampling_params = further
    continued.prompt_token_ids = [*(request.prompt_token_ids or ()), *answered]
    return continued


def _drop_leading(output: EngineCoreOutput, count: int, remaining: int) -> None:
    del output.new_token_ids[:count]
    if output.new_logprobs is not None:
        output.new_logprobs = output.new_logprobs.slice_request(count, remaining)
    if output.new_sampling_mask is not None:
        output.new_sampling_mask = (
            output.new_sampling_mask.slice_request(count, remaining) if remaining else None
        )
