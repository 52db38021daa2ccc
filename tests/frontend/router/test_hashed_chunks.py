"""What is kept of prompts is used where vLLM's hashes are the same, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from frontend.router.cbor_block_hasher import CborBlockHasher, block_hasher
from frontend.router.hashed_chunks import CHUNK_BLOCKS, HashedChunks
from tests.frontend.router.test_cbor_block_hasher import image, make_request
from transfer.block_hash_root import root_hash_of

BLOCK = 4
CHUNK = BLOCK * CHUNK_BLOCKS


@pytest.fixture(autouse=True, scope="module")
def root() -> bytes:
    root_hash_of("sha256_cbor")
    return kv_cache_utils.NONE_HASH


def theirs(request: Request) -> list[Any]:
    function = get_hash_fn_by_name("sha256_cbor")
    return kv_cache_utils.get_request_block_hasher(BLOCK, function)(request)


def fresh_hasher() -> CborBlockHasher:
    hasher = block_hasher(BLOCK, "sha256_cbor")
    assert isinstance(hasher, CborBlockHasher)
    return hasher



@st.composite
def prompts(draw: st.DrawFn) -> Request:
    """Prompts that have much in common: few tokens, few images, few of everything."""
    length = draw(st.integers(0, 5)) * CHUNK + draw(st.integers(0, CHUNK))
    tokens = [7] * length
    for place in draw(st.lists(st.integers(0, 5 * CHUNK), max_size=2)):
        if place < length:
            tokens[place] = 8
    features = []
    offset = draw(st.integers(0, 2 * CHUNK))
    for number in draw(st.lists(st.sampled_from("ab"), max_size=3)):
        size = draw(st.integers(0, 2 * CHUNK))
        features.append(image(number, offset, size))
        # At times they overlap, as vLLM's own never do.
        offset += draw(st.sampled_from([size, size, size + 1, size + BLOCK, size // 2]))
    adapter = draw(st.sampled_from([None, None, "x"]))
    return make_request(tokens, features, adapter, draw(st.sampled_from([None, "s"])))


@settings(deadline=None, max_examples=150)
@given(st.lists(prompts(), min_size=2, max_size=8))
def test_prompts_one_after_the_other_get_vllms_hashes(requests: list[Request]) -> None:
    hasher = fresh_hasher()
    for request in [*requests, *requests]:
        assert hasher(request) == theirs(request)


def test_a_chat_that_grows_is_hashed_from_where_it_is_new(root: bytes) -> None:
    hasher, chunks = fresh_hasher(), HashedChunks(BLOCK)
    tokens = [*range(10 * CHUNK)]
    short = make_request(tokens[: 3 * CHUNK + BLOCK])
    hashes = hasher(short)
    chunks.keep(short, root, hashes, 0)
    long = make_request(tokens)
    assert chunks.known_of(long, root) == hashes[: 3 * CHUNK_BLOCKS]
    assert chunks.known_of(make_request(tokens[1:]), root) == []
    assert hasher(long) == theirs(long)


@pytest.mark.parametrize(
    "other",
    [
        make_request([7] * 2 * CHUNK, [image("b", 5, CHUNK)]),
        make_request([7] * 2 * CHUNK, [image("a", 6, CHUNK)]),
        make_request([7] * 2 * CHUNK, [image("a", 5, CHUNK - 1)]),
        make_request([7] * 2 * CHUNK, [image("a", 5, 3), image("a", 8, CHUNK - 3)]),
        make_request([7] * 2 * CHUNK),
        make_request([7] * 2 * CHUNK, [image("a", 5, CHUNK)], lora="x"),
        make_request([7] * 2 * CHUNK, [image("a", 5, CHUNK)], salt="s"),
    ],
    ids=["image", "place", "length", "two", "none", "adapter", "salt"],
)
def test_whatever_differs_is_not_taken_for_known(other: Request, root: bytes) -> None:
    chunks = HashedChunks(BLOCK)
    request = make_request([7] * 2 * CHUNK, [image("a", 5, CHUNK)])
    chunks.keep(request, root, theirs(request), 0)
    assert len(chunks.known_of(request, root)) == 2 * CHUNK_BLOCKS
    assert chunks.known_of(other, root) == []


def test_an_adapter_that_has_been_replaced_is_another(root: bytes) -> None:
    hasher = fresh_hasher()
    request, replaced = (make_request([7] * 2 * CHUNK, lora="x") for _ in range(2))
    assert replaced.lora_request is not None
    replaced.lora_request.lora_path = "/another"
    for each in (request, replaced, request):
        assert hasher(each) == theirs(each)
    assert hasher(request) != hasher(replaced)


def test_many_images_are_each_found(root: bytes) -> None:
    hasher = fresh_hasher()
    features = [image(f"i{n}", 3 + 7 * n, 5) for n in range(80)]
    request = make_request([7] * 20 * CHUNK, features)
    for _ in range(2):
        assert hasher(request) == theirs(request)


def test_an_image_behind_does_not_matter(root: bytes) -> None:
    chunks = HashedChunks(BLOCK)
    request = make_request([7] * 3 * CHUNK, [image("a", 2 * CHUNK + 1, 9)])
    chunks.keep(request, root, theirs(request), 0)
    other = make_request([7] * 3 * CHUNK, [image("b", 2 * CHUNK + 1, 9)])
    assert chunks.known_of(other, root) == theirs(other)[: 2 * CHUNK_BLOCKS]


def test_images_that_overlap_are_left_alone(root: bytes) -> None:
    chunks = HashedChunks(BLOCK)
    request = make_request([7] * CHUNK, [image("a", 0, 9), image("b", 5, 9)])
    chunks.keep(request, root, theirs(request), 0)
    assert chunks.known_of(request, root) == []


def test_only_the_chunks_used_last_are_kept(root: bytes) -> None:
    chunks = HashedChunks(BLOCK, most_tokens=2 * CHUNK)
    requests = [make_request([token] * CHUNK) for token in range(3)]
    for request in requests[:2]:
        chunks.keep(request, root, theirs(request), 0)
    assert chunks.known_of(requests[0], root)
    chunks.keep(requests[2], root, theirs(requests[2]), 0)
    assert [bool(chunks.known_of(each, root)) for each in requests] == [True, False, True]
