"""The hashes equal those of vLLM's own hasher, whatever the prompt."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from frontend.router import cbor_block_hasher
from frontend.router.cbor_block_hasher import DIGESTS, CborBlockHasher, block_hasher
from transfer.block_hash_root import root_hash_of


@pytest.fixture(autouse=True, scope="module")
def shared_seed():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONHASHSEED", "7")
        yield


def hashers(algorithm, block_size):
    root_hash_of(algorithm)
    function = get_hash_fn_by_name(algorithm)
    theirs = kv_cache_utils.get_request_block_hasher(block_size, function)
    return block_hasher(block_size, algorithm), theirs


def make_request(tokens, features=(), lora=None, salt=None, embeds=None):
    return Request(
        request_id="r",
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=4),
        pooling_params=None,
        arrival_time=1.0,
        mm_features=list(features),
        lora_request=LoRARequest(lora, 1, f"/adapters/{lora}") if lora else None,
        cache_salt=salt,
        prompt_embeds=embeds,
    )


def image(identifier, offset, length):
    return MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=identifier,
        mm_position=PlaceholderRange(offset=offset, length=length),
    )


# All lengths that a token id can have when it is serialized, and their limits.
token_ids = st.one_of(
    st.integers(0, 300), st.integers(0, 70_000), st.integers(0, 2**32 - 1),
    st.sampled_from([23, 24, 255, 256, 65_535, 65_536]),
)


@st.composite
def requests(draw):
    tokens = draw(st.lists(token_ids, max_size=200))
    features = [
        # Names of lengths that are serialized differently; images may touch or overlap.
        image(draw(st.text(max_size=40)) or "i", offset, draw(st.integers(0, 70)))
        for offset in sorted(draw(st.lists(st.integers(0, 220), max_size=5)))
    ]
    lora = draw(st.sampled_from([None, None, "a", "another"]))
    return make_request(tokens, features, lora, draw(st.sampled_from([None, "salt"])))


@pytest.mark.parametrize("algorithm", DIGESTS)
@pytest.mark.parametrize("block_size", [1, 16, 32])
@settings(deadline=None, max_examples=60)
@given(request=requests())
def test_hashes_equal_those_of_vllm(algorithm, block_size, request):
    ours, theirs = hashers(algorithm, block_size)
    assert isinstance(ours, CborBlockHasher)
    assert ours(request) == theirs(request)


def test_a_long_prompt_with_many_images_is_hashed_alike():
    ours, theirs = hashers("sha256_cbor", 16)
    tokens = [n * 7919 % 151_000 for n in range(8_000)]
    features = [image(f"{n:064x}", 100 + 1_500 * n, 1_000 + n) for n in range(5)]
    request = make_request(tokens, features)
    assert len(ours(request)) == 500
    assert ours(request) == theirs(request)


@pytest.mark.parametrize("token", [-1, 2**32, 2**70])
def test_what_no_token_can_be_is_left_to_vllm(token):
    ours, theirs = hashers("sha256_cbor", 16)
    request = make_request([*range(40), token, *range(40)])
    assert ours(request) == theirs(request)


def test_prompt_embeddings_and_answers_are_left_to_vllm():
    ours, theirs = hashers("sha256_cbor", 16)
    embeds = torch.arange(50 * 4, dtype=torch.float32).reshape(50, 4)
    request = make_request(None, embeds=embeds)
    assert ours(request) == theirs(request)
    growing = make_request([*range(40)])
    growing.block_hashes = theirs(growing)
    growing.append_output_token_ids([*range(40)])
    assert ours(growing) == theirs(growing)
    assert len(ours(growing)) == 3


@pytest.mark.parametrize("algorithm", ["sha256", "xxhash"])
def test_algorithms_that_pickle_are_left_to_vllm(algorithm):
    ours, theirs = hashers(algorithm, 16)
    assert not isinstance(ours, CborBlockHasher)
    request = make_request([*range(100)], [image("i", 3, 40)], "a", "salt")
    assert ours(request) == theirs(request)


def test_a_vllm_that_hashes_otherwise_is_noticed(monkeypatch, caplog):
    def reversed_tokens(function, parent, tokens, extra_keys=None):
        return function((parent or kv_cache_utils.NONE_HASH, tuple(tokens)[::-1], extra_keys))

    monkeypatch.setattr(kv_cache_utils, "hash_block_tokens", reversed_tokens)
    monkeypatch.setattr(cbor_block_hasher.logger, "propagate", True)
    with caplog.at_level(logging.WARNING, cbor_block_hasher.logger.name):
        ours, theirs = hashers("sha256_cbor", 16)
    assert not isinstance(ours, CborBlockHasher)
    assert "vLLM's own function" in caplog.text
    request = make_request([*range(100)])
    assert ours(request) == theirs(request)
