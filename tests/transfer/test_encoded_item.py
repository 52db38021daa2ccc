"""A packed item is encoded once, and what is decoded is what vLLM's encoder would give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
)
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from transfer import pack
from transfer.encoded_item import MOST_BYTES, EncodedItem
from transfer.payload import decode_payload_as, encode_payload
from transfer.tensor_ref import EntryRef

PIXELS = torch.arange(2000, dtype=torch.int64)


def item_with(small: Any) -> MultiModalKwargsItem:
    return MultiModalKwargsItem({
        "pixels": MultiModalFieldElem(PIXELS, MultiModalBatchedField()),
        "small": MultiModalFieldElem(small, MultiModalBatchedField(keep_on_cpu=True)),
    })


def packed(small: Any = 7, generation: int = 1) -> EncodedItem:
    item = item_with(small)
    plan = pack.plan(item)
    assert plan is not None
    entry = EntryRef("arena", 4160, plan.nbytes, generation, b"i" * 16)
    return EncodedItem(pack.refer(plan, item, entry).data)


def decoded(frames: Any) -> MultiModalKwargsItem:
    item = MsgpackDecoder(MultiModalKwargsItem).decode([bytearray(f) for f in frames])
    assert isinstance(item, MultiModalKwargsItem)
    return item


@pytest.mark.parametrize("small", [7, torch.arange(3), torch.arange(100)], ids=str)
def test_it_is_decoded_as_what_vllm_encodes(small: Any) -> None:
    item = packed(small)
    plain = MultiModalKwargsItem(dict(item.data))
    assert decoded(MsgpackEncoder().encode(plain)) == plain
    for _ in range(2):
        assert decoded(encode_payload(item)) == plain


def test_it_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    item = packed(torch.arange(3))
    first = [bytes(frame) for frame in encode_payload({"items": [item, item]})]
    monkeypatch.setattr(MsgpackEncoder, "_encode_mm_item", None)
    assert [bytes(frame) for frame in encode_payload({"items": [item, item]})] == first


def test_those_that_share_an_encoding_are_encoded_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = packed()
    other = EncodedItem(dict(one.data), one.encoding)
    frames = encode_payload(one)
    monkeypatch.setattr(MsgpackEncoder, "_encode_mm_item", None)
    assert encode_payload(other) == frames


def test_another_reference_is_another_encoding() -> None:
    one, other = packed(generation=1), packed(generation=2)
    generations = [
        pack.read_reference(decoded(encode_payload(item))).entry.generation
        for item in (one, other, one)
    ]
    assert generations == [1, 2, 1]


def test_tensors_that_travel_as_frames_are_never_kept() -> None:
    whole = EncodedItem(item_with(7).data)
    assert len(encode_payload(whole)) == 2
    middling = packed(torch.arange(100))
    assert len(encode_payload(middling)) == 2
    long = packed([float(n) for n in range(MOST_BYTES)])
    assert len(encode_payload(long)[0]) > MOST_BYTES
    kept = [item.encoding.of(item.data) for item in (whole, middling, long)]
    assert kept == [None, None, None]


def test_one_that_was_changed_is_encoded_anew_and_alone() -> None:
    item = packed()
    other = EncodedItem(dict(item.data), item.encoding)
    before = decoded(encode_payload(item))
    changed = MultiModalFieldElem(8, MultiModalBatchedField(keep_on_cpu=True))
    item["small"] = changed
    assert decoded(encode_payload(item))["small"] == changed
    item |= {"small": other["small"], "more": changed}
    assert decoded(encode_payload(item))["more"] == changed
    item.pop("more")
    for either in (item, other):
        assert decoded(encode_payload(either)) == before


def test_one_that_was_stripped_goes_out_stripped() -> None:
    item = packed()
    encode_payload(item)
    stripped = EncodedItem({"small": item["small"]}, item.encoding)
    assert list(decoded(encode_payload(stripped))) == ["small"]
    del item["pixels"]
    assert "pixels" not in decoded(encode_payload(item))


def test_frames_of_several_items_do_not_get_mixed_up() -> None:
    items = [packed(torch.arange(100) + n) for n in range(3)] + [packed(torch.arange(3))]
    frames = encode_payload(items)
    type_ = list[MultiModalKwargsItem]
    assert decode_payload_as(type_, [bytearray(f) for f in frames]) == items
