"""Which requests go on elsewhere, how, and that nobody can tell."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from vllm.sampling_params import (
    RepetitionDetectionParams,
    SamplingParams,
    StructuredOutputsParams,
)
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists

from frontend.resumption import CannotResume, resume
from tests.fakes import make_item, make_request


def request_with(**params: Any) -> EngineCoreRequest:
    request = make_request(tokens=[1, 2, 3], items=[make_item(1.0)])
    request.sampling_params = SamplingParams(**{"max_tokens": 20, **params})
    return request


def params_of(request: EngineCoreRequest) -> SamplingParams:
    assert request.sampling_params is not None
    return request.sampling_params


def test_what_logits_processors_remember_is_not_known() -> None:
    greedy = request_with(temperature=0.0)
    assert resume(greedy, [7]).request is not greedy
    assert resume(greedy, [7], own_logits_processors=True).request is greedy
    with pytest.raises(CannotResume, match="logits processors that are not vLLM's own"):
        resume(request_with(temperature=1.0), [7], own_logits_processors=True)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "seed": 4},
        {"temperature": 1.0},  # no seed: any continuation is as good
        {"temperature": 0.8, "top_p": 0.9, "top_k": 5, "min_p": 0.1},
        {"temperature": 0.0, "repetition_penalty": 1.3},  # counts the prompt as well
        {"temperature": 0.0, "logit_bias": {5: 2.0}, "allowed_token_ids": [1, 2]},
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.0, "stop": ["x"], "stop_token_ids": [9]},
    ],
)
def test_an_answer_that_depends_on_its_tokens_only_continues(params: dict[str, Any]) -> None:
    original = request_with(**params)
    resumption = resume(original, [7, 8])
    sent = resumption.request
    assert sent.prompt_token_ids == [1, 2, 3, 7, 8]
    assert params_of(sent).max_tokens == 18
    assert sent.mm_features is original.mm_features
    assert (sent.request_id, sent.external_req_id) == ("r", original.external_req_id)
    output = resumption.take(EngineCoreOutput("r", [9]))
    assert output is not None and output.new_token_ids == [9]
    # The one that came is as it was, should it be needed again.
    assert original.prompt_token_ids == [1, 2, 3]
    assert params_of(original).max_tokens == 20


REMEMBERING: dict[str, dict[str, Any]] = {
    "structured output": {"structured_outputs": StructuredOutputsParams(regex="a*")},
    "a presence or frequency penalty": {"presence_penalty": 0.5},
    "penalty": {"frequency_penalty": -0.5},
    "a thinking budget": {"thinking_token_budget": 9},
    "repetition detection": {
        "repetition_detection": RepetitionDetectionParams(
            max_pattern_size=3, min_pattern_size=1, min_count=2
        )
    },
    "extra arguments": {"extra_args": {"mine": 1}},
}


@pytest.mark.parametrize("why", REMEMBERING)
@pytest.mark.parametrize("how", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3}])
def test_an_answer_that_remembers_more_is_given_again_and_swallowed(
    why: str, how: dict[str, Any]
) -> None:
    original = request_with(**REMEMBERING[why], **how)
    resumption = resume(original, [7, 8, 9])
    assert resumption.request is original
    assert resumption.take(EngineCoreOutput("r", [7])) is None
    assert resumption.take(EngineCoreOutput("r", [8])) is None
    last = resumption.take(EngineCoreOutput("r", [9, 10, 11]))
    assert last is not None and last.new_token_ids == [10, 11]
    end = EngineCoreOutput("r", [12], finish_reason=FinishReason.STOP)
    assert resumption.take(end) is end
    assert end.new_token_ids == [12]


@pytest.mark.parametrize("why", REMEMBERING)
def test_what_remembers_more_and_is_drawn_at_random_cannot_go_on(why: str) -> None:
    with pytest.raises(CannotResume, match=f"without a seed.*{why}.*seed or temperature 0"):
        resume(request_with(**REMEMBERING[why], temperature=1.0), [7])


def test_a_seed_is_replayed_since_its_generator_has_moved_on() -> None:
    original = request_with(temperature=1.0, seed=5)
    assert resume(original, [7]).request is original


def test_bad_words_matter_where_they_may_straddle_the_loss() -> None:
    one, several = request_with(temperature=0.0), request_with(temperature=0.0)
    params_of(one)._bad_words_token_ids = [[4], [5]]
    params_of(several)._bad_words_token_ids = [[4], [5, 6]]
    assert resume(one, [7]).request.prompt_token_ids == [1, 2, 3, 7]
    assert resume(several, [7]).request is several


def test_a_prompt_of_embeddings_is_replayed() -> None:
    original = request_with(temperature=0.0)
    original.prompt_token_ids, original.prompt_embeds = None, torch.zeros(3, 4)
    assert resume(original, [7]).request is original


def test_minimum_and_maximum_count_what_has_come() -> None:
    request = request_with(temperature=0.0, min_tokens=5)
    assert params_of(resume(request, [7] * 3).request).min_tokens == 2
    assert params_of(resume(request, [7] * 9).request).min_tokens == 0
    params_of(request).max_tokens = None
    assert params_of(resume(request, [7]).request).max_tokens is None


def test_prompt_logprobs_are_not_asked_for_again() -> None:
    sent = params_of(resume(request_with(temperature=0.0, prompt_logprobs=2), [7]).request)
    assert sent.prompt_logprobs is None
    assert sent.skip_reading_prefix_cache is False


def test_what_was_said_with_the_first_token_is_not_said_again() -> None:
    resumption = resume(request_with(temperature=0.0), [7])
    output = EngineCoreOutput("r", [8], prefill_stats=PrefillStats())
    output.events = []
    news = resumption.take(output)
    assert news is not None and news.prefill_stats is None and news.events is None


def test_log_probabilities_are_those_of_the_tokens_that_are_new() -> None:
    resumption = resume(request_with(temperature=1.0, seed=5, logprobs=1), [7, 8])
    ids = np.array([[7], [8], [9]])
    output = EngineCoreOutput(
        "r", [7, 8, 9], new_logprobs=LogprobsLists(ids, -ids / 10, ids[:, 0])
    )
    news = resumption.take(output)
    assert news is not None and news.new_logprobs is not None
    assert news.new_token_ids == [9]
    assert news.new_logprobs.logprob_token_ids.tolist() == [[9]]


def test_another_answer_is_noticed() -> None:
    with pytest.raises(CannotResume, match="differently"):
        resume(request_with(temperature=1.0, seed=5), [7, 8]).take(
            EngineCoreOutput("r", [7, 9])
        )


def test_a_shorter_answer_is_noticed() -> None:
    end = EngineCoreOutput("r", [7], finish_reason=FinishReason.STOP)
    with pytest.raises(CannotResume, match="earlier"):
        resume(request_with(temperature=1.0, seed=5), [7, 8]).take(end)


def test_an_engine_that_gives_up_is_believed() -> None:
    end = EngineCoreOutput("r", [], finish_reason=FinishReason.ERROR)
    assert resume(request_with(temperature=1.0, seed=5), [7, 8]).take(end) is end


def test_a_request_for_something_else_than_tokens_cannot_go_on() -> None:
    request = request_with()
    request.sampling_params = None
    with pytest.raises(CannotResume):
        resume(request, [7])


def test_an_answer_that_had_come_whole_is_not_made_longer() -> None:
    with pytest.raises(CannotResume, match="not its end"):
        resume(request_with(temperature=0.0, max_tokens=2), [7, 8])
