"""What moving a request and draining a server rely on in vLLM."""

from __future__ import annotations

import inspect

import msgspec
import pytest
from vllm.entrypoints.launchers import launcher
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import (
    OutputProcessor,
    RequestOutputCollector,
    RequestState,
)
from vllm.v1.sample.ops import bad_words, penalties

DEPEND_ON_TOKENS_ONLY = {
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias",
    "allowed_token_ids", "stop_token_ids", "ignore_eos", "_eos_token_id",
    "_all_stop_token_ids", "logprobs", "logprob_token_ids",
}
COUNTED_DOWN = {"max_tokens", "min_tokens"}
GIVEN_WITH_THE_FIRST_TOKEN = {
    "prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start",
    "skip_reading_prefix_cache",
}
REMEMBER = {
    "seed", "structured_outputs", "presence_penalty", "frequency_penalty", "bad_words",
    "_bad_words_token_ids", "thinking_token_budget", "repetition_detection",
    "trace_decode_token_ids", "extra_args",
}
OF_THE_OUTPUT_PROCESSOR = {
    "n", "stop", "flat_logprobs", "detokenize", "skip_special_tokens",
    "spaces_between_special_tokens", "include_stop_str_in_output", "output_kind",
    "stream_interval", "skip_clone", "output_text_buffer_length",
}
OF_SETTINGS_OF_THE_ENGINE = {
    "watermarking", "_watermarking_skipped", "routed_experts_prompt_start",
}


def test_every_sampling_parameter_is_known_to_matter_or_not() -> None:
    """A new one may make an answer depend on more than its tokens: see resumption.py."""
    known = (
        DEPEND_ON_TOKENS_ONLY | COUNTED_DOWN | GIVEN_WITH_THE_FIRST_TOKEN | REMEMBER
        | OF_THE_OUTPUT_PROCESSOR | OF_SETTINGS_OF_THE_ENGINE
    )
    assert set(SamplingParams.__struct_fields__) == known


def test_repetition_counts_prompts_and_the_others_do_not() -> None:
    parameters = list(inspect.signature(penalties.apply_all_penalties).parameters)
    assert parameters[:6] == [
        "logits", "prompt_token_ids", "presence_penalties", "frequency_penalties",
        "repetition_penalties", "output_token_ids",
    ]


def test_bad_words_are_looked_for_in_what_was_generated() -> None:
    assert list(inspect.signature(bad_words.apply_bad_words).parameters) == [
        "logits", "bad_words_token_ids", "past_tokens_ids",
    ]


@pytest.mark.parametrize(
    "name",
    ["prefill_stats", "events", "new_prompt_logprobs_tensors", "prompt_token_id_logprobs",
     "new_logprobs", "new_sampling_mask", "routed_experts"],
)
def test_outputs_have_what_is_taken_out_of_them(name: str) -> None:
    assert issubclass(EngineCoreOutput, msgspec.Struct)
    assert name in EngineCoreOutput.__struct_fields__


def test_an_exception_put_to_a_request_is_raised_to_its_client() -> None:
    source = inspect.getsource(RequestOutputCollector)
    assert "isinstance(output, Exception)" in source
    assert "raise output" in source
    generate = inspect.getsource(AsyncLLM.generate)
    assert "except (VLLMClientError, GracefulHTTPError) as e:" in generate
    assert "queue" in inspect.signature(RequestState.__init__).parameters
    assert list(inspect.signature(OutputProcessor.abort_requests).parameters) == [
        "self", "request_ids", "internal",
    ]


def test_a_server_shuts_its_engine_down_in_a_thread_before_it_ends() -> None:
    source = inspect.getsource(launcher.serve_http)
    assert "app.state.server = server" in source
    shut = source.index("partial(engine_client.shutdown, timeout=timeout)")
    assert source.index("await loop.run_in_executor(") < shut
    assert shut < source.index("server.should_exit = True")
