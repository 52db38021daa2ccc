"""What a preprocess process does until the frontend is gone: one item after the other.

vLLM names relied on: multimodal.inputs.MultiModalKwargsItem.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from vllm.multimodal.inputs import MultiModalKwargsItem

from frontend.preprocess.item_processor import Unreadable
from frontend.preprocess.messages import (
    Began,
    BlockingLine,
    Done,
    Failed,
    Measured,
    Media,
    Place,
    Up,
    Work,
)
from frontend.preprocess.prompt_updates import to_plain
from transfer.arena_writer import ArenaWriter
from transfer.errors import BadMessage, PeerLost
from transfer.identity import IdentityHasher
from transfer.pack import plan, strip, write
from transfer.payload import encode_payload

if TYPE_CHECKING:
    from vllm.multimodal.processing.processor import ResolvedPromptUpdate


class Processor(Protocol):
    """Turns encoded media into an item and its prompt updates.

    Raises:
        Unreadable: the media cannot be decoded.
    """

    def process(
        self, modality: str, media: Media, processor_options: Mapping[str, Any]
    ) -> tuple[MultiModalKwargsItem, Sequence[ResolvedPromptUpdate]]: ...


def work_until_alone(
    line: BlockingLine,
    processor: Processor,
    arena: ArenaWriter,
    hasher: IdentityHasher,
    model: str,
) -> None:
    """Serve one frontend; returns when it closes the line or is gone."""
    try:
        line.send(Up(os.getpid()))
        while True:
            work = line.receive()
            if not isinstance(work, Work):
                raise BadMessage(f"{type(work).__name__} where work was due")
            answer = _work(work, line, processor, arena, hasher, model)
            if answer is not None:
                line.send(answer)
    except (PeerLost, BrokenPipeError, ConnectionResetError):
        return


def _work(
    work: Work,
    line: BlockingLine,
    processor: Processor,
    arena: ArenaWriter,
    hasher: IdentityHasher,
    model: str,
) -> Done | Failed | None:
    """None when there was no room for the item, which the frontend knows."""
    line.send(Began())
    try:
        item, updates = processor.process(work.modality, work.media, work.processor_options)
        plain_updates = [to_plain(update) for update in updates]
        layout = plan(item)
    except Unreadable as error:
        return Failed(unreadable=True, reason=str(error))
    except Exception as error:  # a model's processor may raise anything
        return Failed(unreadable=False, reason=f"{type(error).__name__}: {error}")
    if layout is not None:
        # Said first: the frontend looks for room while the tensors are hashed here.
        line.send(Measured(layout.nbytes))
    identity = hasher.digest(((name, elem.data) for name, elem in item.items()), model)
    rest, copy_seconds = item, 0.0
    if layout is not None:
        place = line.receive()
        if not isinstance(place, Place):
            raise BadMessage(f"{type(place).__name__} where a place was due")
        if place.offset is None:
            return None
        with arena.memory(place.offset, layout.nbytes) as memory:
            began = time.perf_counter()
            write(layout, item, memory)
            copy_seconds = time.perf_counter() - began
        rest = strip(layout, item)
    return Done(
        identity=identity,
        nbytes=layout.nbytes if layout else 0,
        tensors=layout.tensors if layout else (),
        fields=layout.fields if layout else {},
        item=[bytes(frame) for frame in encode_payload(rest)],
        updates=plain_updates,
        copy_seconds=copy_seconds,
    )
