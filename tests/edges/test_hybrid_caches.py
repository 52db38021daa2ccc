"""What is promised of engines with several kinds of cache is what vLLM's own manager finds.

No engine: vLLM's cache manager is fed prompts as its scheduler would feed it, in a cache
that is too small for them, and its events go the way they go in a deployment.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec
import pytest
import torch
from vllm.distributed.kv_events import KVEventBatch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from frontend.router.kv_index import KvIndex
from frontend.router.kv_plane import KvPlane
from transfer.messages import KvSnapshot
from workers.kv_state import KvState

BLOCK = 4
CHUNK = 24
"""Tokens of a prompt that are computed in a step."""
HASH = get_hash_fn_by_name("sha256_cbor")


def attention(kind: Callable[..., KVCacheSpec], **more: int) -> KVCacheSpec:
    return kind(
        block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32, **more
    )


def full() -> KVCacheSpec:
    return attention(FullAttentionSpec)


def window(tokens: int) -> KVCacheSpec:
    return attention(SlidingWindowSpec, sliding_window=tokens)


def state() -> KVCacheSpec:
    return MambaSpec(
        block_size=BLOCK, shapes=((8,),), dtypes=(torch.float32,), mamba_cache_mode="all"
    )


CACHES = {
    "one window": [full(), window(12)],
    "a window of less than a block": [full(), window(3)],
    "windows of two sizes": [full(), window(9), window(22)],
    "a window in two groups": [window(12), window(12), full()],
    "states": [full(), state()],
}


class Engine:
    """vLLM's cache manager, what its worker publishes, and what a frontend makes of it."""

    def __init__(self, specs: Sequence[KVCacheSpec], blocks: int, dense: bool) -> None:
        self.manager = KVCacheManager(
            KVCacheConfig(
                num_blocks=blocks, kv_cache_tensors=[],
                kv_cache_groups=[
                    KVCacheGroupSpec([f"layer {number}"], spec)
                    for number, spec in enumerate(specs)
                ],
                prefix_cache_retention_interval=None if dense else 0,
            ),
            max_model_len=1024, scheduler_block_size=BLOCK, hash_block_size=BLOCK,
            enable_kv_cache_events=True,
        )
        self.hasher = get_request_block_hasher(BLOCK, HASH)
        self.state = KvState(BLOCK, "e")
        self.index = KvIndex()
        self.plane = KvPlane(self.index)
        self.plane.on_ready("w", "e")
        self.plane.on_snapshot("w", KvSnapshot(epoch="e", seq=0, blocks={}))
        self.asked = 0

    def ask(self, prompt: list[int], answer: int) -> tuple[int, int]:
        """Compute a prompt and an answer; returns tokens promised and found."""
        self.asked += 1
        params = SamplingParams(max_tokens=16)
        params.update_from_generation_config({}, 0)
        request = Request(str(self.asked), prompt, params, None, block_hasher=self.hasher)
        reusable = request.block_hashes[: (len(prompt) - 1) // BLOCK]
        promised = self.index.overlap(reusable)["w"] * BLOCK
        blocks, found, boundary = self.manager.get_computed_blocks(request)
        request.shared_prefix_boundary = boundary
        done = found
        while done < len(prompt):
            step = min(CHUNK, len(prompt) - done)
            reused = found if done == found else 0
            assert self.manager.allocate_slots(
                request, step, reused, blocks if reused else None
            ) is not None
            done += step
            request.num_computed_tokens = done
            self._tell()
        for token in range(answer):
            request.append_output_token_ids(token)
            assert self.manager.allocate_slots(request, 1) is not None
            request.num_computed_tokens += 1
            self._tell()
        self.manager.free(request)
        self._tell()
        return promised, found

    def _tell(self) -> None:
        """End the step."""
        self.manager.new_step_starts()
        events = self.manager.take_events()
        if events:
            batch = msgspec.msgpack.encode(KVEventBatch(ts=0.0, events=events))
            if (delta := self.state.apply(batch)) is not None:
                self.plane.on_delta("w", delta)


@pytest.fixture(autouse=True)
def root_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    init_none_hash(HASH)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("blocks", [60, 400])
def test_what_is_promised_is_what_the_engine_finds(
    name: str, blocks: int, dense: bool
) -> None:
    chance = random.Random(f"{name} {blocks}")
    engine = Engine(CACHES[name], blocks, dense)
    stems = [[stem * 100 + n for n in range(70)] for stem in range(4)]
    results = []
    for _ in range(150):
        stem = chance.choice(stems)[: chance.choice([5, 16, 31, 48, 70])]
        prompt = stem + [7000 + chance.randrange(3)] * chance.randrange(1, 20)
        results.append(engine.ask(prompt, chance.randrange(6)))
    assert [promised for promised, _ in results] == [found for _, found in results]
    assert sum(found > 0 for _, found in results) > 10
