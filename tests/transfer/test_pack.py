from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalSharedField,
    PlaceholderRange,
)
from vllm.multimodal.utils import group_and_batch_mm_kwargs, strip_covered_mm_data
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from transfer import pack
from transfer.arena import Arena
from transfer.arena_view import ArenaView
from transfer.errors import BadMessage
from transfer.identity import SEED_BYTES, IdentityHasher
from transfer.pack import REFERENCE_KEY
from transfer.tensor_ref import EntryRef, ItemRef, TensorSpec


def elem(data: Any, *, keep_on_cpu: bool = False) -> MultiModalFieldElem:
    return MultiModalFieldElem(data, MultiModalBatchedField(keep_on_cpu=keep_on_cpu))


def image_item(pixels: Any = None) -> MultiModalKwargsItem:
    """An item like Qwen-VL's: pixels, and a small grid that stays on the CPU."""
    if pixels is None:
        pixels = torch.arange(6000, dtype=torch.float32).view(60, 100)
    return MultiModalKwargsItem(
        {
            "pixel_values": elem(pixels),
            "image_grid_thw": elem(torch.tensor([1, 6, 10]), keep_on_cpu=True),
        }
    )


def entry_of(nbytes: int) -> EntryRef:
    return EntryRef(arena="a", offset=4160, nbytes=nbytes, generation=1, identity=b"i" * 16)


def packed_into_memory(item: MultiModalKwargsItem) -> tuple[MultiModalKwargsItem, memoryview]:
    plan = pack.plan(item)
    assert plan is not None
    memory = memoryview(bytearray(plan.nbytes))
    pack.write(plan, item, memory)
    digested = memoryview(bytearray(plan.nbytes))
    moving = pack.moving_fields(plan, item, digested)
    hasher = IdentityHasher(bytes(SEED_BYTES))
    fields = [(name, item[name].data) for name in item]
    assert hasher.digest(moving, "") == hasher.digest(fields, "")
    assert digested == memory
    return pack.refer(plan, item, entry_of(plan.nbytes)), memory


def resolved(packed: MultiModalKwargsItem, memory: memoryview) -> MultiModalKwargsItem:
    return pack.resolve(packed, memory, pack.read_reference(packed))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        equal = one.dtype == other.dtype and one.shape == other.shape
        return equal and torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def over_the_wire(item: MultiModalKwargsItem) -> MultiModalKwargsItem:
    frames = [bytearray(frame) for frame in MsgpackEncoder().encode(item)]
    decoded = MsgpackDecoder(MultiModalKwargsItem).decode(frames)
    assert isinstance(decoded, MultiModalKwargsItem)
    return decoded


def test_an_item_comes_back_as_it_was_in_another_mapping(tmp_path: Path) -> None:
    item = image_item()
    plan = pack.plan(item)
    assert plan is not None
    with Arena(2**16, tmp_path) as arena, ArenaView(arena.id, tmp_path) as view:
        reservation = arena.reserve(plan.nbytes)
        pack.write(plan, item, reservation.memory)
        lease = reservation.seal(b"i" * 16)
        received = over_the_wire(pack.refer(plan, item, lease.entry))
        reference = pack.read_reference(received)
        assert reference.entry == lease.entry
        result = pack.resolve(received, view.read(reference.entry), reference)
    assert result == item
    assert list(result) == list(item)


def test_the_packed_item_carries_a_small_reference_instead_of_pixels() -> None:
    packed, _ = packed_into_memory(image_item())
    assert pack.is_packed(packed)
    assert list(packed) == ["pixel_values", "image_grid_thw", REFERENCE_KEY]
    assert packed["pixel_values"].data is None
    assert packed["pixel_values"].field == MultiModalBatchedField()
    assert torch.equal(packed["image_grid_thw"].data, torch.tensor([1, 6, 10]))
    assert sum(len(frame) for frame in MsgpackEncoder().encode(packed)) < 512


def test_packing_leaves_the_item_itself_alone() -> None:
    item = image_item()
    packed_into_memory(item)
    assert list(item) == ["pixel_values", "image_grid_thw"]
    assert item == image_item()


@pytest.mark.parametrize(
    "pixels",
    [
        torch.arange(4096, dtype=torch.uint8).view(64, 64),
        torch.arange(600, dtype=torch.int64),
        torch.randn(700).to(torch.bfloat16),
        torch.randn(7, 100).to(torch.float16),
        torch.randn(1, 300, 1),
        torch.rand(2000) > 0.5,
        torch.arange(10_000, dtype=torch.int32).view(100, 100).T,
        torch.arange(10_000, dtype=torch.float64)[::3],
        torch.tensor(1.5).expand(300),
        [torch.randn(300), torch.arange(7, dtype=torch.uint8), torch.randn(2, 200)],
        [[torch.randn(300)], [torch.randn(3, 5), torch.randn(1)], []],
        [torch.randn(300), torch.empty(0, 4), torch.tensor(2.5)],
    ],
    ids=lambda pixels: str(getattr(pixels, "dtype", "list")),
)
def test_any_tensors_come_back_the_same(pixels: Any) -> None:
    item = MultiModalKwargsItem({"first": elem(1.5), "pixels": elem(pixels), "last": elem(7)})
    packed, memory = packed_into_memory(item)
    assert packed["pixels"].data is None
    result = resolved(over_the_wire(packed), memory)
    assert list(result) == ["first", "pixels", "last"]
    assert same(result["pixels"].data, pixels)
    assert (result["first"].data, result["last"].data) == (1.5, 7)


def test_tensors_of_several_fields_lie_apart_and_aligned() -> None:
    item = MultiModalKwargsItem(
        {
            "one": elem(torch.full((1025,), 1, dtype=torch.uint8)),
            "two": elem(torch.full((1030,), 2, dtype=torch.uint8)),
        }
    )
    plan = pack.plan(item)
    assert plan is not None
    assert [spec.offset for spec in plan.tensors] == [0, 1088]
    assert plan.nbytes == 1088 + 1030
    packed, memory = packed_into_memory(item)
    assert resolved(packed, memory) == item


def test_fields_keep_the_way_they_are_batched() -> None:
    flat = MultiModalFlatField(slices=[slice(0, 60)], dim=0)
    item = MultiModalKwargsItem(
        {"pixel_values": MultiModalFieldElem(torch.randn(60, 100), flat)}
    )
    packed, memory = packed_into_memory(item)
    assert resolved(packed, memory)["pixel_values"].field == flat


def test_resolved_items_are_batched_with_items_that_never_moved() -> None:
    packed, memory = packed_into_memory(image_item())
    items = [("image", resolved(packed, memory)), ("image", image_item())]
    groups = list(group_and_batch_mm_kwargs(items))
    assert [count for _, count, _ in groups] == [2]
    assert groups[0][2]["pixel_values"].shape == (2, 60, 100)


def test_resolved_tensors_are_the_memory_itself() -> None:
    packed, memory = packed_into_memory(image_item(torch.zeros(2048, dtype=torch.uint8)))
    tensor = resolved(packed, memory)["pixel_values"].data
    memory[5] = 77
    assert tensor[5] == 77
    tensor[6] = 78
    assert memory[6] == 78


def test_writing_copies_straight_into_the_memory() -> None:
    item = image_item(torch.randint(0, 255, (4 << 20,), dtype=torch.uint8))
    plan = pack.plan(item)
    assert plan is not None
    memory = memoryview(bytearray(plan.nbytes))
    tracemalloc.start()
    try:
        pack.write(plan, item, memory)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 * 1024
    assert memory == item["pixel_values"].data.numpy().data


@pytest.mark.parametrize(
    "item",
    [
        MultiModalKwargsItem(),
        MultiModalKwargsItem({"small": elem(torch.zeros(1023, dtype=torch.uint8))}),
        MultiModalKwargsItem({"small_list": elem([torch.zeros(100), torch.zeros(100)])}),
        MultiModalKwargsItem({"on_cpu": elem(torch.zeros(5000), keep_on_cpu=True)}),
        MultiModalKwargsItem({"mixed": elem([torch.zeros(5000), 1.5])}),
        MultiModalKwargsItem({"number": elem(1), "list": elem([])}),
        MultiModalKwargsItem({"none": elem(None)}),
        MultiModalKwargsItem({"complex": elem(torch.zeros(5000, dtype=torch.complex64))}),
        MultiModalKwargsItem({"sparse": elem(torch.zeros(5000).to_sparse())}),
    ],
    ids=lambda item: "+".join(item) or "empty",
)
def test_what_is_not_worth_moving_stays_inline(item: MultiModalKwargsItem) -> None:
    assert pack.plan(item) is None
    assert not pack.is_packed(item)


def test_small_tensors_that_are_large_together_move() -> None:
    assert pack.plan(MultiModalKwargsItem({"a": elem([torch.zeros(128)] * 2)})) is not None


def test_an_item_that_was_stripped_by_the_prefix_cache_passes_untouched() -> None:
    packed, memory = packed_into_memory(image_item())
    feature = MultiModalFeatureSpec(packed, "image", "id", PlaceholderRange(0, 15))
    stripped = strip_covered_mm_data([feature], 32, uses_mrope=True)[0].data
    assert stripped is not None
    assert list(stripped) == ["image_grid_thw"]
    assert not pack.is_packed(stripped)
    assert pack.resolve(stripped, memory, pack.read_reference(packed)) is stripped


def test_a_plan_is_not_used_for_other_memory_items_or_entries() -> None:
    item = image_item()
    plan = pack.plan(item)
    assert plan is not None
    memory = memoryview(bytearray(plan.nbytes))
    for put in (pack.write, pack.moving_fields):
        with pytest.raises(ValueError, match="bytes of memory"):
            put(plan, item, memoryview(bytearray(plan.nbytes + 1)))
        for other in (torch.zeros(100, 60), torch.zeros(60, 100, dtype=torch.int32)):
            with pytest.raises(ValueError, match="not the one"):
                put(plan, image_item(other), memory)
    with pytest.raises(ValueError, match="an entry of"):
        pack.refer(plan, item, entry_of(plan.nbytes - 1))


def words(encoded: bytes) -> list[int]:
    """As a reference is carried."""
    padded = encoded + bytes(-len(encoded) % 8)
    return [len(encoded), *struct.unpack(f"<{len(padded) // 8}Q", padded)]


@pytest.mark.parametrize(
    "data",
    [
        None,
        1,
        torch.zeros(8, dtype=torch.uint8),
        [],
        [8],
        (8, 1),
        [torch.zeros(3, dtype=torch.uint8)],
        [1, torch.zeros(3, dtype=torch.uint8)],
        [torch.zeros(3, dtype=torch.uint8), 1],
        [torch.zeros(1, dtype=torch.bool), 1],
        [True, 1],
        [8, 1],
        [0, 0],
        [9, 0],
        [-1, 0],
        [8, -1],
        [8, 2**64],
        [8, 1.0],
        [8, [1]],
        ["8", 1],
        [8.0, 1],
        [float("nan"), 1],
        [2**70, 1],
        words(bytes([0x91]) * 3000),
        words(msgspec.msgpack.encode([["a", "0", 1, 1, b"i"], [], {}])),
    ],
)
def test_a_reference_that_does_not_decode_is_refused(data: Any) -> None:
    item = MultiModalKwargsItem(
        {REFERENCE_KEY: MultiModalFieldElem(data, MultiModalSharedField(batch_size=1))}
    )
    with pytest.raises(BadMessage):
        pack.read_reference(item)


def test_an_item_without_a_reference_has_none_to_read() -> None:
    with pytest.raises(BadMessage, match="no reference"):
        pack.read_reference(image_item())


def deep(levels: int) -> Any:
    nested: Any = 0
    for _ in range(levels):
        nested = [nested]
    return nested


GOOD = TensorSpec("float32", (60, 100), 0)


@pytest.mark.parametrize(
    ("tensors", "fields"),
    [
        ((TensorSpec("float32", (60, 101), 0),), {"pixel_values": 0}),
        ((TensorSpec("float32", (60, 100), 64),), {"pixel_values": 0}),
        ((TensorSpec("float32", (1, 1), -64),), {"pixel_values": 0}),
        ((TensorSpec("float32", (1, 1), 4),), {"pixel_values": 0}),
        ((TensorSpec("float32", (0,), 24_064),), {"pixel_values": 0}),
        ((TensorSpec("float32", (-1, -100), 0),), {"pixel_values": 0}),
        ((TensorSpec("float32", (2**40, 2**40), 0),), {"pixel_values": 0}),
        ((TensorSpec("float32", (0, 2**63), 0),), {"pixel_values": 0}),
        ((TensorSpec("float32", (2**62, 0, 2**62), 0),), {"pixel_values": 0}),
        ((TensorSpec("complex64", (1,), 0),), {"pixel_values": 0}),
        ((TensorSpec("load", (1,), 0),), {"pixel_values": 0}),
        ((TensorSpec("", (1,), 0),), {"pixel_values": 0}),
        ((GOOD,), {"pixel_values": 1}),
        ((GOOD,), {"pixel_values": -1}),
        ((GOOD,), {"pixel_values": [0, "0"]}),
        ((GOOD,), {"pixel_values": [True]}),
        ((GOOD,), {"pixel_values": [[None]]}),
        ((GOOD,), {"other": 0}),
        ((GOOD,), {"pixel_values": 0, "image_grid_thw": 0}),
        ((GOOD,), {"pixel_values": 0, REFERENCE_KEY: 0}),
    ],
    ids=str,
)
def test_a_reference_that_does_not_fit_is_refused(
    tensors: tuple[TensorSpec, ...], fields: dict[str, Any]
) -> None:
    packed, memory = packed_into_memory(image_item())
    reference = ItemRef(entry_of(memory.nbytes), tensors, fields)
    for check in (
        lambda: pack.resolve(packed, memory, reference),
        lambda: pack.check_reference(packed, reference),
    ):
        with pytest.raises(BadMessage):
            check()


@pytest.mark.parametrize("levels", [pack.MAX_NESTING + 1, 480, 5000])
def test_a_reference_nested_beyond_reason_is_refused(levels: int) -> None:
    packed, memory = packed_into_memory(image_item())
    reference = ItemRef(entry_of(memory.nbytes), (GOOD,), {"pixel_values": deep(levels)})
    with pytest.raises(BadMessage):
        pack.check_reference(packed, reference)


def test_lists_move_up_to_that_depth_and_else_stay_inline() -> None:
    nested: Any = torch.zeros(60, 100)
    for _ in range(pack.MAX_NESTING):
        nested = [nested]
    item = image_item(nested)
    packed, memory = packed_into_memory(item)
    assert resolved(packed, memory)["pixel_values"] == item["pixel_values"]
    assert pack.plan(image_item([nested])) is None


def test_memory_of_another_entry_is_refused() -> None:
    packed, memory = packed_into_memory(image_item())
    with pytest.raises(BadMessage, match="for an entry of"):
        resolved(packed, memory[:-64])


def test_a_reference_moves_to_another_entry_with_the_same_bytes() -> None:
    item = image_item()
    packed, memory = packed_into_memory(item)
    elsewhere = msgspec.structs.replace(entry_of(memory.nbytes), arena="b", generation=9)
    moved = pack.move_reference(packed, elsewhere)
    assert pack.read_reference(moved).entry == elsewhere
    assert pack.read_reference(packed).entry == entry_of(memory.nbytes)
    assert same(resolved(moved, memory)["pixel_values"].data, item["pixel_values"].data)
    with pytest.raises(BadMessage, match="known here with 64"):
        pack.move_reference(packed, entry_of(64))


def test_the_layout_does_not_depend_on_the_order_of_the_fields() -> None:
    """Which differs between processes, as vLLM collects the names in a set."""
    pixels, mask = elem(torch.full((4096,), 7)), elem(torch.full((2048,), 1))
    one = pack.plan(MultiModalKwargsItem({"pixel_values": pixels, "pixel_mask": mask}))
    other = pack.plan(MultiModalKwargsItem({"pixel_mask": mask, "pixel_values": pixels}))
    assert one == other is not None
