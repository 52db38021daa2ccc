"""Encoder outputs on their way from encode workers to the hosts that need them.

The frontend is the go-between: the encode worker makes an output readable, a worker of the
other host reads it by NIXL into its host's cache, and the encode worker may let go. Where
that fails, nothing of this pair is moved for a while and images are encoded in place.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable

from frontend.router.image_affinity import ImageAffinity
from frontend.worker import Worker
from transfer.messages import (
    EmbeddingExported,
    EmbeddingPulled,
    ExportEmbedding,
    PullEmbedding,
    ReleaseEmbedding,
)

logger = logging.getLogger(__name__)

MOVE_SECONDS = 10.0
"""How long a move may take. The first is the longest: both sides take memory for it."""
TURN_SECONDS = 10.0
"""How long one may wait for its turn. Beyond that its request would not wait for it either,
and more would queue than the line carries."""
MOST_AT_ONCE = 4
"""Moves of one encode worker to one host; more would only share the line, and need room."""
RETRY_SECONDS = 30.0
"""How long after a failure a host is given nothing more by that encode worker."""

Answer = EmbeddingExported | EmbeddingPulled


class _MoveFailed(Exception):
    """An output does not come; the text says why."""


class EmbeddingMoves:
    """Used on one event loop."""

    def __init__(self, images: ImageAffinity, count: Callable[[str], None]) -> None:
        """``count`` is told what became of each move: ``moved`` or ``failed``."""
        self._images = images
        self._count = count
        self._ids = itertools.count()
        self._asked: dict[tuple[str, int], asyncio.Future[Answer]] = {}
        """By worker and move, who waits for an answer."""
        self._paused: dict[tuple[str, str], float] = {}
        """By encode worker and shared cache, until when nothing is moved."""
        self._turns: dict[tuple[str, str], asyncio.Semaphore] = {}
        self._misfits: set[str] = set()
        """Encode workers that run another model than somebody who generates."""

    def __len__(self) -> int:
        """Count the answers that are waited for."""
        return len(self._asked)

    def may_help(self, encoder: Worker, generator: Worker) -> bool:
        """Whether outputs of ``encoder`` can be of use on the host of ``generator``."""
        theirs, ours = (self._images.cache_of(w.name) for w in (encoder, generator))
        if not (theirs and ours and encoder.nixl and generator.nixl):
            return False
        if _model_of(theirs) != _model_of(ours):
            if encoder.name not in self._misfits:
                self._misfits.add(encoder.name)
                logger.warning(
                    "encode worker %s is of no use to %s: the models, their options or the "
                    "times of the checkpoint's files differ", encoder.name, generator.name,
                )
            return False
        return not self._is_paused((encoder.name, ours))

    async def move(self, identifier: str, source: Worker, target: Worker) -> bool:
        """Have an output of ``source`` put into the cache of ``target``'s host.

        Tells whether it is there, within ``MOVE_SECONDS`` from when it has its turn, and
        that within ``TURN_SECONDS``.
        """
        cache = self._images.cache_of(target.name)
        pair = (source.name, cache)
        moved = await self._in_turn(pair, identifier, source, target)
        if moved:
            self._images.note_shared(cache, identifier)
        elif not self._is_paused(pair):
            self._pause(pair)
        self._count("moved" if moved else "failed")
        return moved

    def on_message(self, worker: Worker, message: Answer) -> None:
        """Take over what a worker has done for a move."""
        future = self._asked.get((worker.name, message.move_id))
        if future is not None and not future.done():
            future.set_result(message)
        elif isinstance(message, EmbeddingExported) and message.offer is not None:
            worker.link.send(ReleaseEmbedding(message.move_id))  # too late

    def on_lost(self, worker: Worker) -> None:
        """A worker has gone, and with it the moves that it has a part in."""
        self._misfits.discard(worker.name)
        for pair in [pair for pair in self._turns if pair[0] == worker.name]:
            del self._turns[pair]
        for (name, _), future in self._asked.items():
            if name == worker.name and not future.done():
                future.set_exception(_MoveFailed(f"worker {name} was lost"))

    async def _in_turn(
        self, pair: tuple[str, str], identifier: str, source: Worker, target: Worker
    ) -> bool:
        turn = self._turns.setdefault(pair, asyncio.Semaphore(MOST_AT_ONCE))
        try:
            async with asyncio.timeout(TURN_SECONDS):
                await turn.acquire()
        except TimeoutError:
            logger.warning(
                "outputs of %s do not reach %s as fast as they are asked for",
                source.name, target.name,
            )
            return False
        try:
            return not self._is_paused(pair) and await self._try(identifier, source, target)
        finally:
            turn.release()

    async def _try(self, identifier: str, source: Worker, target: Worker) -> bool:
        move_id = next(self._ids)
        try:
            async with asyncio.timeout(MOVE_SECONDS):
                await self._move(move_id, identifier, source, target)
        except (TimeoutError, _MoveFailed) as error:
            # Not released: it may still be being read. The encode worker has a limit.
            reason = str(error) or f"not done within {MOVE_SECONDS:.0f} s"
            logger.warning(
                "an encoder output of %s does not reach %s: %s",
                source.name, target.name, reason,
            )
            return False
        source.link.send(ReleaseEmbedding(move_id))
        return True

    async def _move(
        self, move_id: int, identifier: str, source: Worker, target: Worker
    ) -> None:
        """
        Raises:
            _MoveFailed: one of the two says why it cannot.
        """
        exported = await self._ask(source, ExportEmbedding(move_id, identifier))
        if not isinstance(exported, EmbeddingExported) or exported.offer is None:
            raise _MoveFailed(exported.error)
        pulled = await self._ask(target, PullEmbedding(move_id, identifier, exported.offer))
        if pulled.error:
            raise _MoveFailed(pulled.error)

    async def _ask(self, worker: Worker, message: ExportEmbedding | PullEmbedding) -> Answer:
        if not worker.epoch:
            raise _MoveFailed(f"worker {worker.name} was lost")
        asked = (worker.name, message.move_id)
        future = self._asked[asked] = asyncio.get_running_loop().create_future()
        try:
            worker.link.send(message)
            return await future
        finally:
            del self._asked[asked]

    def _is_paused(self, pair: tuple[str, str]) -> bool:
        return self._paused.get(pair, 0.0) > time.monotonic()

    def _pause(self, pair: tuple[str, str]) -> None:
        now = time.monotonic()
        self._paused = {each: until for each, until in self._paused.items() if until > now}
        self._paused[pair] = now + RETRY_SECONDS


def _model_of(cache: str) -> str:
    """The part of a shared cache's name that is the same on other hosts."""
    return cache.partition("@")[0]
