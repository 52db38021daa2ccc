"""Frames as strangers might send them, of which no more than a ``BadMessage`` may come."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from transfer.errors import BadMessage
from transfer.messages import Frame

FRAMES = st.lists(st.binary(max_size=200).map(bytearray), max_size=4)
CHANGES = st.lists(
    st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4
)


def received(frames: Sequence[Frame]) -> list[Frame]:
    """Frames as they arrive: the tensors of a payload lie in writable memory."""
    return [bytearray(frame) for frame in frames]


@st.composite
def spoiled(draw: st.DrawFn, frames: Sequence[Frame]) -> list[Frame]:
    """``frames`` with some bytes of the first changed; it may be cut, and others missing."""
    head = bytearray(frames[0])
    changes = draw(CHANGES)
    for place, value in changes:
        head[place % len(head)] = value
    if draw(st.booleans()):
        del head[changes[0][0] % len(head) :]
    return [head, *frames[1 : len(frames) - draw(st.integers(0, 3))]]


def no_more_than_bad(decoder: Any, frames: Sequence[Frame]) -> None:
    with warnings.catch_warnings():
        # Hostile bytes may name what numpy has deprecated.
        warnings.simplefilter("ignore")
        try:
            decoder(frames)
        except BadMessage:
            return
