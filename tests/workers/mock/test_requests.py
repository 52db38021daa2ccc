from __future__ import annotations

from typing import Any

import pytest
from vllm.sampling_params import SamplingParams

from frontend.router.block_hashes import RequestHasher
from tests.fakes import BLOCK_SIZE, make_item, make_request
from transfer.block_hash_root import root_hash_of
from workers.mock.engine import EncoderItem
from workers.mock.requests import ANSWER_TOKENS, RequestReader, answer_to

ALGORITHM = "sha256_cbor"


def reader(max_model_len: int = 1000) -> RequestReader:
    return RequestReader(BLOCK_SIZE, ALGORITHM, max_model_len)


def test_a_prompt_has_the_hashes_that_the_frontend_routes_by() -> None:
    request = make_request(tokens=range(100), items=[make_item()])
    hasher = RequestHasher(BLOCK_SIZE, ALGORITHM, root_hash_of(ALGORITHM))
    blocks = hasher.hash(request)
    read = reader().read(request).request
    assert read.prompt_tokens == 100
    assert list(read.digests[: len(blocks.digests)]) == blocks.digests


def test_the_next_turn_finds_the_answer_in_its_prompt() -> None:
    first = reader().read(make_request(tokens=range(40), max_tokens=30))
    both = [*range(40), *first.answer]
    second = reader().read(make_request(tokens=[*both, 1, 2, 3]))
    assert len(first.request.digests) == 70 // BLOCK_SIZE
    assert second.request.digests[: 70 // BLOCK_SIZE] == first.request.digests


def test_an_answer_depends_on_prompt_and_images_and_on_nothing_else() -> None:
    cat, dog = EncoderItem("cat", 0, 4), EncoderItem("dog", 0, 4)
    answer = answer_to([1, 2, 3], (cat,), 50)
    assert answer == answer_to([1, 2, 3], (cat,), 50)
    assert answer[:20] == answer_to([1, 2, 3], (cat,), 20)
    assert answer != answer_to([1, 2, 4], (cat,), 50)
    assert answer != answer_to([1, 2, 3], (dog,), 50)
    assert set(answer) <= set(ANSWER_TOKENS)


def test_a_prompt_with_the_beginning_of_its_answer_is_answered_with_the_rest() -> None:
    cat = EncoderItem("cat", 0, 4)
    answer = answer_to([1, 2, 3], (cat,), 50)
    for begun in (1, 7, 49):
        rest = answer_to([1, 2, 3, *answer[:begun]], (cat,), 50 - begun)
        assert answer[:begun] + rest == answer


def test_images_are_read_with_their_place_and_length() -> None:
    read = reader().read(make_request(items=[make_item(), make_item(1.0)]))
    assert read.request.items == (EncoderItem("hash-0", 0, 4), EncoderItem("hash-1", 4, 4))


def test_an_answer_ends_where_the_model_does() -> None:
    assert len(reader(50).read(make_request(tokens=range(40), max_tokens=99)).answer) == 10
    with pytest.raises(ValueError, match="no room"):
        reader(40).read(make_request(tokens=range(40)))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"sampling_params": None}, "generates tokens"),
        ({"prompt_token_ids": None}, "prompts of tokens"),
        ({"sampling_params": SamplingParams(logprobs=2)}, "log-probabilities"),
        ({"sampling_params": SamplingParams(prompt_logprobs=1)}, "log-probabilities"),
    ],
)
def test_what_cannot_be_answered_is_refused(changes: dict[str, Any], why: str) -> None:
    request = make_request()
    for name, value in changes.items():
        setattr(request, name, value)
    with pytest.raises(ValueError, match=why):
        reader().read(request)


def test_a_request_that_must_not_read_the_cache_says_so() -> None:
    request = make_request()
    assert reader().read(request).request.reads_cache
    request.sampling_params = SamplingParams(skip_reading_prefix_cache=True, max_tokens=3)
    assert not reader().read(request).request.reads_cache
