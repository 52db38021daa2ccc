"""Which workers are taken in and which are refused, and why."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes import FakeWorker, eventually, make_facts
from tests.frontend.fleets import Fleet
from transfer.messages import PROTOCOL_VERSION
from transfer.registry import Registry

pytestmark = pytest.mark.anyio


def refusal_of(fleet: Fleet, name: str) -> str:
    return next((w.refused for w in fleet.pool.workers if w.name == name), "")


DIFFERENT: dict[str, Any] = {
    "protocol": PROTOCOL_VERSION + 1,
    "vllm_version": "0.31.0",
    "model": "other",
    "revision": "other",
    "dtype": "bfloat16",
    "block_size": 32,
    "hash_algorithm": "xxhash_cbor",
    "root_hash": "00" * 32,
    "max_model_len": 4096,
    "encoder_cache_tokens": 1,
    "mm_device_do_normalize": False,
    "mm_processor_kwargs": '{"max_pixels": 1}',
    "lora": "{}",
    "reasoning_parser": "qwen3",
    "identity_seed_fingerprint": "other",
}


@pytest.mark.parametrize("field", DIFFERENT)
async def test_a_worker_unlike_the_first_is_refused_by_name_of_what_differs(
    registry: Registry, field: str
) -> None:
    async with Fleet(registry) as fleet:
        await fleet.start("first")
        # It takes this frontend whatever its seed: who refuses here is the frontend.
        second = await fleet.introduce("second", facts=make_facts(**{field: DIFFERENT[field]}))
        second.inbox._handshake._seed_fingerprint = ""
        await eventually(lambda: refusal_of(fleet, "second"))
        assert f"its {field} is" in refusal_of(fleet, "second")
        assert set(fleet.pool.ready_workers()) == {"first"}


@pytest.mark.parametrize("field", ["num_kv_blocks", "max_num_seqs", "max_num_batched_tokens"])
async def test_workers_may_differ_in_size(registry: Registry, field: str) -> None:
    async with Fleet(registry) as fleet:
        await fleet.start("first")
        await fleet.start("second", facts=make_facts(**{field: 7}))


async def test_a_worker_unlike_the_frontends_settings_is_refused(registry: Registry) -> None:
    async with Fleet(registry, expected={"dtype": "float32", "model": "mine"}) as fleet:
        await fleet.introduce("worker-1")
        await eventually(lambda: refusal_of(fleet, "worker-1"))
        assert refusal_of(fleet, "worker-1") == (
            "its model is 'demo', this frontend's is 'mine'"
        )
        assert not fleet.learned


async def test_hashes_from_another_root_are_refused(registry: Registry) -> None:
    async with Fleet(registry) as fleet:
        await fleet.introduce("worker-1", facts=make_facts(root_hash="00" * 32))
        await eventually(lambda: refusal_of(fleet, "worker-1"))
        assert "PYTHONHASHSEED" in refusal_of(fleet, "worker-1")


async def test_a_worker_that_refuses_the_frontend_gets_no_requests(
    registry: Registry,
) -> None:
    async with Fleet(registry) as fleet:
        facts = make_facts(identity_seed_fingerprint="another")
        await fleet.introduce("worker-1", facts=facts)
        await eventually(lambda: refusal_of(fleet, "worker-1"))
        assert "another image identity seed" in refusal_of(fleet, "worker-1")
        assert not fleet.pool.ready_workers()


async def test_a_refused_worker_is_taken_once_it_comes_back_as_it_should_be(
    registry: Registry,
) -> None:
    wrong = FakeWorker(
        registry, "wrong", address="tcp://127.0.0.1:*", facts=make_facts(model="other")
    )
    wrong.start()
    expected: dict[str, object] = {"model": "demo"}
    async with Fleet(registry, addresses=[wrong.address], expected=expected) as fleet:
        await eventually(lambda: refusal_of(fleet, "wrong"))
        await wrong.stop()
        right = FakeWorker(registry, "right", address=wrong.address, epoch="epoch-2")
        right.start()
        await fleet.until_ready("right")
        assert refusal_of(fleet, "right") == ""
        await right.stop()


async def test_workers_need_not_agree_on_logits_processors(registry: Registry) -> None:
    """One that only encodes has none. What any has counts for all."""
    encoder = FakeWorker(registry, "encoder", facts=make_facts(role="encode"))
    async with encoder, Fleet(registry) as fleet:
        await eventually(lambda: fleet.pool.encode_workers())
        assert not fleet.pool.own_logits_processors()
        await fleet.start("generator", facts=make_facts(own_logits_processors=True))
        assert fleet.pool.own_logits_processors()


async def test_events_are_listened_to_where_the_worker_was_reached(
    registry: Registry,
) -> None:
    worker = FakeWorker(registry, "everywhere", address="tcp://127.0.0.1:*")
    worker.ready.kv_address = "tcp://0.0.0.0:5999"
    worker.start()
    async with Fleet(registry, addresses=[worker.address]) as fleet:
        await fleet.until_ready("everywhere")
        (seen,) = fleet.pool.workers
        assert seen.kv is not None
        assert seen.kv.address == "tcp://127.0.0.1:5999"
    await worker.stop()
