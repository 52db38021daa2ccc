"""The frontend's block hashes are the engine's own, and so is the overlap from them.

The engine's side is vLLM's KV cache manager, which looks up prefixes, allocates, evicts
and emits the KV events: all of an engine that matters here, without a model.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from vllm.distributed.kv_events import KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalSharedField,
    PlaceholderRange,
)
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from frontend.router.block_hashes import RequestHasher, RootHashMismatch
from frontend.router.kv_index import KvIndex
from frontend.router.kv_plane import KvPlane
from transfer.block_hash_root import root_hash_of
from transfer.payload import decode_request, encode_payload
from workers.kv_state import KvState

BLOCK = 16
ALGORITHM = "sha256_cbor"


@pytest.fixture
def hasher(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    return RequestHasher(BLOCK, ALGORITHM, root_hash_of(ALGORITHM))


def image(identifier, offset, length, pixels=None):
    data = None
    if pixels is not None:
        elem = MultiModalFieldElem(pixels, MultiModalSharedField(batch_size=1))
        data = MultiModalKwargsItem({"pixel_values": elem})
    return MultiModalFeatureSpec(
        data=data,
        modality="image",
        identifier=identifier,
        mm_position=PlaceholderRange(offset, length),
        mm_hash=f"processing-{identifier}",
    )


def make_request(
    tokens, images=(), salt=None, lora=None, params=None, request_id="r", embeds=None
):
    pooling = params if isinstance(params, PoolingParams) else None
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(tokens) if tokens is not None else None,
        mm_features=list(images) or None,
        sampling_params=None if pooling else params or SamplingParams(max_tokens=4),
        pooling_params=pooling,
        arrival_time=1.0,
        lora_request=LoRARequest(lora, 1, "/nowhere") if lora else None,
        cache_salt=salt,
        data_parallel_rank=None,
        prompt_embeds=embeds,
    )


class Engine:
    """vLLM's cache manager with the events it publishes, read as our worker reads them."""

    def __init__(self, num_blocks=64):
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32
        )
        function = get_hash_fn_by_name(ALGORITHM)
        init_none_hash(function)
        self.block_hasher = get_request_block_hasher(BLOCK, function)
        self.manager = KVCacheManager(
            KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
            max_model_len=4096,
            scheduler_block_size=BLOCK,
            hash_block_size=BLOCK,
            enable_kv_cache_events=True,
        )
        self.state = KvState(BLOCK, "e1")
        self.index = KvIndex()
        self.plane = KvPlane(self.index)
        self.plane.on_ready("w", "e1")
        self.plane.on_snapshot("w", self.state.snapshot())

    def cached_blocks(self, request):
        """How many blocks the engine would take from its cache for this request."""
        _, tokens, _ = self.manager.get_computed_blocks(self.received(request))
        return tokens // BLOCK

    def start(self, request):
        """Compute the prompt; return the engine's request, which holds its blocks."""
        engine_side = self.received(request)
        blocks, computed, _ = self.manager.get_computed_blocks(engine_side)
        allocated = self.manager.allocate_slots(
            engine_side, engine_side.num_tokens - computed, computed, blocks
        )
        assert allocated is not None
        self.publish()
        return engine_side

    def run(self, request):
        self.manager.free(self.start(request))
        self.publish()

    def publish(self):
        events = self.manager.take_events()
        payload = msgspec.msgpack.encode(KVEventBatch(ts=0.0, events=events))
        delta = self.state.apply(payload)
        if delta is not None:
            assert not self.plane.on_delta("w", delta)

    def received(self, request):
        """The request as the engine sees it: after the wire."""
        frames = [bytearray(frame) for frame in encode_payload(request)]
        return Request.from_engine_core_request(decode_request(frames), self.block_hasher)

    def overlap(self, hasher, request):
        """What the router makes of the published events."""
        blocks = hasher.hash(request)
        return self.index.overlap(blocks.digests[: blocks.reusable])["w"]


@pytest.fixture
def engine(monkeypatch, hasher):
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    return Engine()


VARIANTS = {
    "plain": {},
    "one image": {"images": [image("i1", 10, 40)]},
    "another image": {"images": [image("i2", 10, 40)]},
    "image elsewhere": {"images": [image("i1", 11, 40)]},
    "two images": {"images": [image("i1", 10, 20), image("i2", 40, 20)]},
    "two images swapped": {"images": [image("i2", 10, 20), image("i1", 40, 20)]},
    "salted": {"salt": "s1"},
    "other salt": {"salt": "s2"},
    "adapter": {"lora": "a1"},
    "other adapter": {"lora": "a2"},
    "adapter, salt and image": {"lora": "a1", "salt": "s1", "images": [image("i1", 10, 40)]},
}
TOKENS = list(range(100))


@pytest.mark.parametrize("name", VARIANTS)
def test_hashes_equal_those_of_the_engine(name, hasher, engine):
    request = make_request(TOKENS, **VARIANTS[name])
    blocks = hasher.hash(request)
    assert blocks.digests == engine.received(request).block_hashes
    assert len(blocks.digests) == 6
    assert (blocks.num_tokens, blocks.reusable, blocks.block_size) == (100, 6, BLOCK)


def test_what_sets_prompts_apart_for_the_engine_sets_their_hashes_apart(hasher):
    requests = [make_request(TOKENS, **variant) for variant in VARIANTS.values()]
    last_blocks = {hasher.hash(request).digests[-1] for request in requests}
    assert len(last_blocks) == len(VARIANTS)


def test_prompt_embeddings_are_hashed_as_the_engine_does(hasher, engine):
    embeds = torch.arange(50 * 4, dtype=torch.float32).reshape(50, 4)
    request = make_request(None, embeds=embeds)
    assert hasher.hash(request).digests == engine.received(request).block_hashes
    assert hasher.hash(request) != hasher.hash(make_request(None, embeds=embeds + 1))


@pytest.mark.parametrize("name", VARIANTS)
def test_overlap_from_events_is_what_the_engine_will_reuse(name, hasher, engine):
    engine.run(make_request(TOKENS, **VARIANTS["one image"]))
    request = make_request(TOKENS, **VARIANTS[name])
    assert engine.overlap(hasher, request) == engine.cached_blocks(request)


def test_a_repeated_request_overlaps_in_all_its_reusable_blocks(hasher, engine):
    request = make_request(TOKENS, **VARIANTS["two images"])
    assert engine.overlap(hasher, request) == 0
    engine.run(request)
    assert engine.overlap(hasher, request) == engine.cached_blocks(request) == 6


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33, 48])
def test_the_last_token_is_always_computed(length, hasher, engine):
    request = make_request(range(length))
    engine.run(request)
    assert engine.overlap(hasher, request) == engine.cached_blocks(request)
    assert hasher.hash(request).reusable == (length - 1) // BLOCK


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=4, prompt_logprobs=1),
        SamplingParams(max_tokens=4, skip_reading_prefix_cache=True),
        PoolingParams(task="token_embed", skip_reading_prefix_cache=True),
    ],
    ids=["prompt logprobs", "told so", "pooling"],
)
def test_a_request_that_reads_no_cache_can_reuse_nothing(params, hasher, engine):
    engine.run(make_request(TOKENS))
    request = make_request(TOKENS, params=params)
    assert engine.cached_blocks(request) == 0
    assert hasher.hash(request).reusable == 0
    assert len(hasher.hash(request).digests) == 6


@pytest.mark.usefixtures("engine")
def test_overlap_stays_exact_while_the_engine_evicts_and_holds_copies(hasher):
    engine = Engine(num_blocks=24)
    rng = np.random.default_rng(5)
    # Whole blocks: the last one is computed anew, so several copies of it may exist.
    lengths = [16, 32, 48, 5, 17, 40, 63, 80]
    prompts = [
        make_request([*range(32), *([p] * length)]) for p, length in enumerate(lengths)
    ]
    running, copies, seen = [], 0, set()
    for step in range(300):
        request = prompts[int(rng.integers(len(prompts)))]
        request.request_id = f"r{step}"
        needed = len(request.prompt_token_ids) // BLOCK + 1
        while running and engine.manager.block_pool.get_num_free_blocks() < needed:
            engine.manager.free(running.pop(0))
        running.append(engine.start(request))
        counts = engine.state._groups["GPU"][0].values()
        copies = max(copies, *counts)
        for other in prompts:
            cached = engine.cached_blocks(other)
            assert engine.overlap(hasher, other) == cached
            seen.add(cached)
    assert len(seen) > 3
    assert copies > 1


def test_a_reset_of_the_engine_ends_all_overlap(hasher, engine):
    request = make_request(TOKENS)
    engine.run(request)
    assert engine.overlap(hasher, request) == 6
    assert engine.manager.reset_prefix_cache()
    engine.publish()
    assert engine.overlap(hasher, request) == engine.cached_blocks(request) == 0


def test_hashing_leaves_the_request_as_it_was(hasher):
    pixels = torch.arange(12, dtype=torch.float32)
    schema = StructuredOutputsParams(json={"type": "object"})
    params = SamplingParams(max_tokens=4, structured_outputs=schema)
    request = make_request(TOKENS, [image("i1", 10, 40, pixels)], "s", "a", params)
    frames = [bytes(frame) for frame in encode_payload(request)]
    hasher.hash(request)
    hasher.hash(request)
    assert [bytes(frame) for frame in encode_payload(request)] == frames
    assert request.prompt_token_ids == TOKENS
    assert request.sampling_params.structured_outputs is schema
    kept = request.mm_features[0].data["pixel_values"].data
    assert kept.data_ptr() == pixels.data_ptr()


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
def test_a_shared_hash_seed_gives_a_shared_root(algorithm, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    RequestHasher(BLOCK, algorithm, root_hash_of(algorithm))


def test_another_hash_seed_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    root = root_hash_of(ALGORITHM)
    monkeypatch.setenv("PYTHONHASHSEED", "8")
    with pytest.raises(RootHashMismatch, match=r"PYTHONHASHSEED.*--prefix-caching-hash-algo"):
        RequestHasher(BLOCK, ALGORITHM, root)


def test_another_algorithm_is_refused():
    with pytest.raises(RootHashMismatch):
        RequestHasher(BLOCK, "sha256_cbor", root_hash_of("sha256"))


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_a_root_drawn_at_random_is_refused_with_the_remedy(algorithm, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ValueError, match="PYTHONHASHSEED"):
        root_hash_of(algorithm)


def test_an_unknown_algorithm_is_refused():
    with pytest.raises(ValueError, match="md5"):
        root_hash_of("md5")


def test_images_are_told_by_what_the_encoder_cache_knows_them_by(hasher):
    images = [image("one", 3, 20), image("lora:two", 30, 40)]
    blocks = hasher.hash(make_request(range(100), images))
    assert blocks.images == (("one", 3, 20), ("lora:two", 30, 40))
    assert not blocks.last_match_dropped


def test_an_engine_that_drops_its_last_match_is_noted():
    hasher = RequestHasher(BLOCK, ALGORITHM, root_hash_of(ALGORITHM), drops_last_match=True)
    assert hasher.hash(make_request(range(100))).last_match_dropped
