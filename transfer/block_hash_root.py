"""The digest that every chain of block hashes starts from.

A worker states it when it registers and a frontend computes its own. Only when the two
are equal do the frontend's block hashes mean anything to that worker's engine.

vLLM names relied on: utils.hashing.get_hash_fn_by_name;
v1.core.kv_cache_utils.init_none_hash, resolve_none_hash_seed, NONE_HASH.
"""

from __future__ import annotations

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils


def root_hash_of(algorithm: str) -> str:
    """Return the root hash, in hex, that an engine started like this process uses.

    ``algorithm`` is a value of ``--prefix-caching-hash-algo``. Also sets vLLM's root of
    this process, which vLLM's block hasher reads: one algorithm per process.

    Raises:
        ValueError: vLLM does not know the algorithm, or would seed it at random in each
            process, so that no two processes could agree.
    """
    hash_function = get_hash_fn_by_name(algorithm)
    if kv_cache_utils.resolve_none_hash_seed(
        hash_function
    ) != kv_cache_utils.resolve_none_hash_seed(hash_function):
        raise ValueError(
            f"--prefix-caching-hash-algo {algorithm} is seeded at random in each process: "
            "set PYTHONHASHSEED to one value for all workers and frontends, "
            "or use sha256_cbor"
        )
    kv_cache_utils.init_none_hash(hash_function)
    return kv_cache_utils.NONE_HASH.hex()
