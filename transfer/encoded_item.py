"""An item that refers to shared memory, together with the bytes it has on the wire.

The same picture goes out again and again, each time with the same reference: its encoding
is made when it is first sent and kept with whatever keeps the item. It is used only while
the item has the very fields that were encoded, so that one which was changed, or stripped
of some, never goes out as what it was.

vLLM names relied on: multimodal.inputs.MultiModalKwargsItem, MultiModalFieldElem;
UserDict.data, which it is built on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from vllm.multimodal.inputs import MultiModalFieldElem, MultiModalKwargsItem

MOST_BYTES = 8192
"""Longer encodings are not kept: they hold more than a reference and small numbers."""

Fields = dict[str, MultiModalFieldElem]


class Encoding:
    """The bytes of one item, once it has been encoded."""

    __slots__ = ("_fields", "_raw")

    def __init__(self) -> None:
        self._fields: Fields = {}
        self._raw: msgspec.Raw | None = None

    def keep(self, fields: Fields, frames: Sequence[Any]) -> None:
        """Keep what an item of these fields is encoded as, if that is one short frame."""
        if len(frames) == 1 and len(frames[0]) <= MOST_BYTES:
            self._fields, self._raw = dict(fields), msgspec.Raw(frames[0])

    def of(self, fields: Fields) -> msgspec.Raw | None:
        """Return the bytes of an item of these fields; None if they are not here."""
        known = self._fields
        if len(fields) == len(known) and all(
            known.get(key) is elem for key, elem in fields.items()
        ):
            return self._raw
        return None


class EncodedItem(MultiModalKwargsItem):
    """An item whose encoding is kept in ``encoding``, which others may share.

    The data within its fields may not be changed any more: it is shared as well.
    """

    def __init__(self, fields: Fields, encoding: Encoding | None = None) -> None:
        super().__init__()
        self.data = fields
        self.encoding = Encoding() if encoding is None else encoding
