"""What one request costs the router: hashing its prompt, and choosing a worker."""

from __future__ import annotations

import random
import time
from statistics import median

import torch
from vllm import SamplingParams
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.v1.engine import EngineCoreRequest

from benchmarks.metrics import Metric, rounded
from frontend.router.block_hashes import RequestBlocks, RequestHasher
from frontend.router.cost import RouterSettings
from frontend.router.image_affinity import PromptImage
from frontend.router.router import Router
from transfer.block_hash_root import root_hash_of

BLOCK_SIZE = 16
TOKENS = 8 * 1024
IMAGES = 4
IMAGE_TOKENS = 1_000
ALGORITHM = "sha256_cbor"
ROUNDS = 200
WORKERS = 64

HASH = ("hash_ms_8k_tokens", "ms", "<=3")
DECISION = ("decision_ms_64_workers", "ms", "<=0.5")
PROMISED = [HASH, DECISION]


def measure() -> list[Metric]:
    hashing, deciding = _hash_ms(), _decision_ms()
    print(f"  {TOKENS} tokens, {IMAGES} images: hashing {hashing:.2f} ms")
    print(f"  {WORKERS} workers: one decision {deciding:.3f} ms")
    return [
        Metric(HASH[0], rounded(hashing), *HASH[1:]),
        Metric(DECISION[0], rounded(deciding), *DECISION[1:]),
    ]


def _hash_ms() -> float:
    hasher = RequestHasher(BLOCK_SIZE, ALGORITHM, root_hash_of(ALGORITHM))
    rng = random.Random(1)
    times = []
    for number in range(ROUNDS):
        request = _request(str(number), [rng.randrange(150_000) for _ in range(TOKENS)])
        began = time.thread_time()
        hasher.hash(request)
        times.append(time.thread_time() - began)
    return median(times) * 1e3


def _request(request_id: str, tokens: list[int]) -> EngineCoreRequest:
    item = MultiModalKwargsItem(
        {"pixel_values": MultiModalFieldElem(torch.zeros(8), MultiModalBatchedField())}
    )
    features = [
        MultiModalFeatureSpec(
            data=item,
            modality="image",
            identifier=f"image-{number:064x}",
            mm_position=PlaceholderRange(offset=200 + 2_000 * number, length=IMAGE_TOKENS),
            mm_hash=f"image-{number:064x}",
        )
        for number in range(IMAGES)
    ]
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=tokens,
        mm_features=features,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def _decision_ms() -> float:
    """Every worker holds a part of the prompt's first half, and has requests in flight."""
    router = Router("kv", RouterSettings(), time.monotonic, random.Random(1))
    rng = random.Random(2)
    workers = [f"w{number}" for number in range(WORKERS)]
    count = TOKENS // BLOCK_SIZE
    shared = [rng.randbytes(32) for _ in range(count // 2)]
    for worker in workers:
        router.index.store(worker, shared[: rng.randrange(len(shared))])
    times = []
    for number in range(ROUNDS + WORKERS):
        digests = [*shared, *(rng.randbytes(32) for _ in range(count // 2))]
        images = tuple(
            PromptImage(f"{number}-{k}", 200 + 2_000 * k, IMAGE_TOKENS) for k in range(IMAGES)
        )
        blocks = RequestBlocks(digests, count - 1, TOKENS, BLOCK_SIZE, images)
        began = time.thread_time()
        router.route(f"r{number}", blocks, TOKENS, workers)
        if number >= WORKERS:
            times.append(time.thread_time() - began)
            router.finish(f"r{number - WORKERS}")
    return median(times) * 1e3
