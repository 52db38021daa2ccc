"""A multimodal item with its large tensors in shared memory, and back.

Packing keeps every key of the item in its place: a field that moved keeps its ``field``
and has ``data=None``, and one more key, ``REFERENCE_KEY``, says where its tensors are.
Resolving builds the tensors over the memory they were written to; nothing is copied.

What stays inline: fields that vLLM keeps on the CPU (it reads them to compute
positions), small ones, and whatever is not made of plain tensors. An item that vLLM has
stripped down to its CPU fields has no reference any more and passes as it is.

vLLM names relied on: multimodal.inputs.MultiModalKwargsItem, MultiModalFieldElem,
MultiModalSharedField, BaseMultiModalField.keep_on_cpu; UserDict.data under the first.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from vllm.multimodal.inputs import (
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalSharedField,
)

from transfer.errors import BadMessage
from transfer.identity import Moving
from transfer.tensor_ref import EntryRef, ItemRef, TensorSpec

REFERENCE_KEY = "foveal.reference"
MIN_FIELD_BYTES = 1024
TENSOR_ALIGNMENT = 64
MAX_NESTING = 16
"""So many lists may lie within each other in a field that moves. Both ends of a reference
have room for these on their stacks, however deep they stand."""

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    )
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_WORD = np.dtype("<u8")
_WORD_BYTES = _WORD.itemsize
_REFERENCE_FIELD = MultiModalSharedField(batch_size=1)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ItemRef)

Indices = int | list[Any]
"""An index into a plan's tensors, or nested lists of them."""


@dataclass(frozen=True)
class ItemPlan:
    """Where the tensors of one item go within ``nbytes`` of memory."""

    nbytes: int
    tensors: tuple[TensorSpec, ...]
    fields: dict[str, Indices]


def plan(item: MultiModalKwargsItem) -> ItemPlan | None:
    """Lay out the tensors that are worth moving; None when there are none."""
    tensors: list[TensorSpec] = []
    fields: dict[str, Indices] = {}
    end = 0

    def place(data: Any) -> Indices:
        nonlocal end
        if isinstance(data, list | tuple):
            return [place(part) for part in data]
        offset = -(-end // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT
        end = offset + data.nbytes
        tensors.append(TensorSpec(_DTYPE_NAMES[data.dtype], tuple(data.shape), offset))
        return len(tensors) - 1

    # By name, as identities are made: vLLM's order differs from process to process, and one
    # that finds the entry of another combines it with its own plan.
    for key, elem in sorted(item.data.items()):
        if _is_worth_moving(elem):
            fields[key] = place(elem.data)
    return ItemPlan(end, tuple(tensors), fields) if fields else None


def moving_fields(
    plan: ItemPlan, item: MultiModalKwargsItem, memory: memoryview
) -> list[tuple[str, Any]]:
    """Return the fields of ``item`` as ``IdentityHasher.digest`` takes them.

    Digesting them copies the planned tensors to their places in ``memory``, each once.

    Raises:
        ValueError: the memory or the item is not what the plan was made for.
    """
    _require_room(plan, memory)
    return [
        (key, _moving(plan, plan.fields[key], elem.data, memory))
        if key in plan.fields
        else (key, elem.data)
        for key, elem in item.items()
    ]


def write(plan: ItemPlan, item: MultiModalKwargsItem, memory: memoryview) -> None:
    """Copy the tensors of ``item`` to their places in ``memory``, each once.

    Raises:
        ValueError: the memory or the item is not what the plan was made for.
    """
    _require_room(plan, memory)
    for key, indices in plan.fields.items():
        _write(plan, indices, item[key].data, memory)


def strip(plan: ItemPlan, item: MultiModalKwargsItem) -> MultiModalKwargsItem:
    """Return a new item without the tensors that the plan moves; all keys stay."""
    return _item_of(_stripped(plan, item))


def refer(
    plan: ItemPlan, item: MultiModalKwargsItem, entry: EntryRef
) -> MultiModalKwargsItem:
    """Return a new item that refers to ``entry`` instead of carrying the tensors.

    Raises:
        ValueError: the entry is not one that this plan was written to.
    """
    if entry.nbytes != plan.nbytes:
        raise ValueError(f"an entry of {entry.nbytes} bytes for a plan of {plan.nbytes}")
    packed = _stripped(plan, item)
    packed[REFERENCE_KEY] = _reference_elem(ItemRef(entry, plan.tensors, plan.fields))
    return _item_of(packed)


def _stripped(
    plan: ItemPlan, item: MultiModalKwargsItem
) -> dict[str, MultiModalFieldElem]:
    return {
        key: _without_data(elem) if key in plan.fields else elem
        for key, elem in item.data.items()
    }


def _item_of(fields: dict[str, MultiModalFieldElem]) -> MultiModalKwargsItem:
    """Return the item with these fields, without UserDict's walk over each of them."""
    item = MultiModalKwargsItem()
    item.data = fields
    return item


def _reference_elem(reference: ItemRef) -> MultiModalFieldElem:
    encoded = _encoder.encode(reference)
    # Numbers, which vLLM carries as they are: on its way through three processes a tensor
    # is made, or taken apart, five times.
    words = np.frombuffer(encoded + bytes(-len(encoded) % _WORD_BYTES), _WORD).tolist()
    data = [len(encoded), *words]
    return MultiModalFieldElem(data=data, field=_REFERENCE_FIELD)


def is_packed(item: MultiModalKwargsItem) -> bool:
    """Tell whether the item refers to tensors that it does not carry."""
    return REFERENCE_KEY in item.data


def lacks_tensors(item: MultiModalKwargsItem) -> bool:
    """Tell whether fields of the item have no data, and no reference says where it is."""
    return not is_packed(item) and any(elem.data is None for elem in item.values())


def without_reference(item: MultiModalKwargsItem) -> MultiModalKwargsItem:
    """Return a packed item without its tensors: only what is small is left."""
    return MultiModalKwargsItem({k: e for k, e in item.items() if k != REFERENCE_KEY})


def read_reference(item: MultiModalKwargsItem) -> ItemRef:
    """Return where the tensors of a packed item are.

    Raises:
        BadMessage: the item has no reference, or one that does not decode.
    """
    elem = item.data.get(REFERENCE_KEY)
    data: Any = None if elem is None else elem.data
    if type(data) is not list or len(data) < 2 or any(type(n) is not int for n in data):
        raise BadMessage("the item has no reference, or not one made of numbers")
    try:
        encoded = memoryview(struct.pack(f"<{len(data) - 1}Q", *data[1:]))
        if not 0 <= encoded.nbytes - data[0] < _WORD_BYTES:
            raise BadMessage(f"a reference of {data[0]} bytes in {encoded.nbytes}")
        return _decoder.decode(encoded[: data[0]])
    except (struct.error, msgspec.MsgspecError, RecursionError) as error:
        raise BadMessage(f"the reference does not decode: {error}") from error


def check_reference(item: MultiModalKwargsItem, reference: ItemRef) -> None:
    """Make sure that ``resolve`` will build the item, given the entry's bytes.

    Raises:
        BadMessage: the reference does not fit the item or its own entry.
    """
    elems = item.data
    if any(key not in elems or elems[key].data is not None for key in reference.fields):
        raise BadMessage("the reference names fields that did not move")
    for spec in reference.tensors:
        _check_tensor(spec, reference.entry.nbytes)
    places = list(range(len(reference.tensors)))
    for indices in reference.fields.values():
        _nest(indices, places)


def move_reference(item: MultiModalKwargsItem, entry: EntryRef) -> MultiModalKwargsItem:
    """Return the item with a reference to ``entry``, which holds the same bytes.

    Raises:
        BadMessage: the entry has not the length of the one that the item refers to.
    """
    reference = read_reference(item)
    if reference.entry.nbytes != entry.nbytes:
        raise BadMessage(
            f"an entry of {reference.entry.nbytes} bytes, known here with {entry.nbytes}"
        )
    moved = ItemRef(entry, reference.tensors, reference.fields)
    return _item_of({**item.data, REFERENCE_KEY: _reference_elem(moved)})


def resolve(
    item: MultiModalKwargsItem, memory: memoryview, reference: ItemRef
) -> MultiModalKwargsItem:
    """Return the item as it was before packing, its tensors built over ``memory``.

    ``memory`` is the payload of ``reference.entry``, and lives as long as the tensors.
    An item that is not packed is returned as it is.

    Raises:
        BadMessage: the reference does not fit the item or the memory.
    """
    if not is_packed(item):
        return item
    if memory.nbytes != reference.entry.nbytes:
        raise BadMessage(f"{memory.nbytes} bytes for an entry of {reference.entry.nbytes}")
    check_reference(item, reference)
    tensors = [
        _over(memory, _DTYPES[spec.dtype], spec.shape, spec.offset)
        for spec in reference.tensors
    ]
    data = {key: _nest(indices, tensors) for key, indices in reference.fields.items()}
    resolved = {}
    for key, elem in item.data.items():
        if key in data:
            resolved[key] = MultiModalFieldElem(data=data[key], field=elem.field)
        elif key != REFERENCE_KEY:
            resolved[key] = elem
    return _item_of(resolved)


def _is_worth_moving(elem: MultiModalFieldElem) -> bool:
    if elem.field.keep_on_cpu:
        return False
    nbytes = _movable_bytes(elem.data)
    return nbytes is not None and nbytes >= MIN_FIELD_BYTES


def _movable_bytes(data: Any, levels: int = MAX_NESTING) -> int | None:
    """Return the bytes of all tensors in ``data``; None if there is anything else, or more
    than ``levels`` of lists."""
    if isinstance(data, torch.Tensor):
        movable = data.dtype in _DTYPE_NAMES and data.layout == torch.strided
        return data.nbytes if movable else None
    if not isinstance(data, list | tuple) or not levels:
        return None
    total = 0
    for part in data:
        nbytes = _movable_bytes(part, levels - 1)
        if nbytes is None:
            return None
        total += nbytes
    return total


def _without_data(elem: MultiModalFieldElem) -> MultiModalFieldElem:
    # vLLM documents None here, and encodes it, but its annotation leaves it out.
    return MultiModalFieldElem(data=None, field=elem.field)  # type: ignore[arg-type]


def _require_room(plan: ItemPlan, memory: memoryview) -> None:
    if memory.nbytes != plan.nbytes:
        raise ValueError(f"{memory.nbytes} bytes of memory for a plan of {plan.nbytes}")


def _spec_of(plan: ItemPlan, index: int, tensor: torch.Tensor) -> TensorSpec:
    spec = plan.tensors[index]
    if (_DTYPE_NAMES.get(tensor.dtype), tuple(tensor.shape)) != (spec.dtype, spec.shape):
        raise ValueError("the item is not the one that the plan was made for")
    return spec


def _moving(plan: ItemPlan, indices: Indices, data: Any, memory: memoryview) -> Any:
    if isinstance(indices, list):
        parts = zip(indices, data, strict=True)
        return [_moving(plan, part_indices, part, memory) for part_indices, part in parts]
    start = _spec_of(plan, indices, data).offset
    return Moving(data, memory[start : start + data.nbytes])


def _write(plan: ItemPlan, indices: Indices, data: Any, memory: memoryview) -> None:
    if isinstance(indices, list):
        for part_indices, part in zip(indices, data, strict=True):
            _write(plan, part_indices, part, memory)
        return
    spec = _spec_of(plan, indices, data)
    if data.numel():
        _copy(data, _over(memory, data.dtype, spec.shape, spec.offset))


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    if source.is_cpu and source.is_contiguous():
        # One memcpy in this thread. torch would share it out among its own, and while
        # the machine is busy waiting for the last of them takes several times longer.
        np.copyto(_bytes_of(target), _bytes_of(source))
    else:
        target.copy_(source)


def _bytes_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    return tensor.detach().view(-1).view(torch.uint8).numpy()


def _check_tensor(spec: TensorSpec, room: int) -> None:
    """Make sure that a tensor has a dtype of ours and lies within ``room`` bytes."""
    dtype = _DTYPES.get(spec.dtype)
    if dtype is None:
        raise BadMessage(f"dtype {spec.dtype!r} is not allowed")
    if any(length < 0 for length in spec.shape):
        raise BadMessage(f"a negative length in shape {spec.shape}")
    # torch counts the strides of an empty tensor, too.
    if prod(max(length, 1) for length in spec.shape) > sys.maxsize:
        raise BadMessage(f"a length beyond reason in shape {spec.shape}")
    nbytes = prod(spec.shape) * dtype.itemsize
    inside = 0 <= spec.offset <= room - nbytes
    if not inside or spec.offset % TENSOR_ALIGNMENT:
        raise BadMessage(f"no tensor of {nbytes} bytes can be at {spec.offset}")


def _over(
    memory: memoryview, dtype: torch.dtype, shape: tuple[int, ...], offset: int
) -> torch.Tensor:
    """Return a tensor whose elements are the bytes at ``offset`` of ``memory``."""
    count = prod(shape)
    if not count:  # torch refuses to build these over memory
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
    return flat.view(shape)


def _nest(indices: Indices, tensors: Sequence[Any], levels: int = MAX_NESTING) -> Any:
    if isinstance(indices, list):
        if not levels:
            raise BadMessage("the reference is nested too deep")
        return [_nest(part, tensors, levels - 1) for part in indices]
    if type(indices) is not int or not 0 <= indices < len(tensors):
        raise BadMessage(f"no tensor has index {indices!r}")
    return tensors[indices]
