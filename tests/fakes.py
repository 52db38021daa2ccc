"""Stand-ins for an engine and for the worker process around it.

Only the engine is made up. A fake worker is the shipped inbox, outbox, links and registry
record, in this process instead of one of its own.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, TypeVar, cast

import msgspec
import torch
import zmq.asyncio
from vllm.distributed.kv_events import BlockStored, KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError

from transfer.arena import Arena
from transfer.arena_layout import SHM
from transfer.block_hash_root import root_hash_of
from transfer.identity import IdentityHasher
from transfer.link import KvPublisher, WorkerLink
from transfer.messages import PROTOCOL_VERSION, Frame, Ready, WorkerFacts
from transfer.payload import decode_request
from transfer.process import Process, this_process
from transfer.registry import Registry, WorkerRecord
from workers.arena_worker import ArenaReader
from workers.embedding_cache import HostEmbeddings
from workers.embedding_exports import exports_of
from workers.engine_inputs import EngineInputs
from workers.frontends import Frontends
from workers.inbox import Inbox
from workers.kv_state import KvState
from workers.load_report import LoadReporter
from workers.nixl_transfer import NixlTransfer
from workers.outbox import Outbox
from workers.worker_process import attach

BLOCK_SIZE = 16
HASHER = IdentityHasher(bytes(range(32)))
PATIENCE = 20.0
"""Seconds after which something that should happen is taken not to happen."""

T = TypeVar("T")


async def within(work: Awaitable[T], seconds: float = PATIENCE) -> T:
    return await asyncio.wait_for(work, seconds)


async def eventually(condition: Callable[[], object]) -> None:
    """Wait for what announces itself by no event."""
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.002)


def make_item(pixels: torch.Tensor | float = 0.0) -> MultiModalKwargsItem:
    """An item like Qwen-VL's: pixels, and a small grid that stays on the CPU."""
    if not isinstance(pixels, torch.Tensor):
        pixels = torch.full((8, 100), pixels)
    grid = torch.tensor([1, 2, 4])
    return MultiModalKwargsItem(
        {
            "pixel_values": MultiModalFieldElem(pixels, MultiModalBatchedField()),
            "image_grid_thw": MultiModalFieldElem(
                grid, MultiModalBatchedField(keep_on_cpu=True)
            ),
        }
    )


def make_request(
    request_id: str = "r",
    *,
    tokens: Iterable[int] = range(40),
    items: Sequence[MultiModalKwargsItem | None] = (),
    max_tokens: int = 3,
    lora: LoRARequest | None = None,
) -> EngineCoreRequest:
    """A request as vLLM's input processor makes it."""
    features = [
        MultiModalFeatureSpec(
            data=item,
            modality="image",
            identifier=f"hash-{index}",
            mm_position=PlaceholderRange(offset=4 * index, length=4),
            mm_hash=f"hash-{index}",
        )
        for index, item in enumerate(items)
    ]
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(tokens),
        mm_features=features or None,
        sampling_params=SamplingParams(max_tokens=max_tokens),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=lora,
        cache_salt=None,
        data_parallel_rank=None,
    )


def make_facts(**changes: Any) -> WorkerFacts:
    facts = WorkerFacts(
        protocol=PROTOCOL_VERSION,
        vllm_version="0.32.0",
        model="demo",
        revision="",
        dtype="float32",
        block_size=BLOCK_SIZE,
        hash_algorithm="sha256_cbor",
        root_hash=root_hash_of("sha256_cbor"),
        max_model_len=8192,
        max_num_seqs=16,
        max_num_batched_tokens=2048,
        encoder_cache_tokens=2048,
        num_kv_blocks=100,
        mm_device_do_normalize=True,
        mm_processor_kwargs="{}",
        lora="",
        reasoning_parser="",
        identity_seed_fingerprint=HASHER.fingerprint,
    )
    return msgspec.structs.replace(facts, **changes)


class FakeRunner:
    """Stands below ``ArenaReader`` where vLLM's worker class stands."""

    def __init__(self) -> None:
        self.executed: list[Any] = []

    def execute_model(self, scheduler_output: Any) -> str:
        self.executed.append(scheduler_output)
        return "computed"


class FakeArenaReader(ArenaReader, FakeRunner):
    """The shipped worker class over a fake base."""


def make_reader() -> FakeArenaReader:
    try:
        return FakeArenaReader()
    finally:
        # It asks to die with its parent, which is not for the process of the tests.
        ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)


class FakeEngine:
    """What a worker uses of vLLM's AsyncMPClient. Answers with the prompt's first tokens."""

    def __init__(self) -> None:
        self.added: asyncio.Queue[EngineCoreRequest] = asyncio.Queue()
        self.aborted: asyncio.Queue[list[str]] = asyncio.Queue()
        self.called: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
        self.answers: dict[str, Any] = {}
        """What utility calls return, or raise."""
        self.stalled = False
        """Takes requests and says nothing about them."""
        self.step_over = asyncio.Event()
        """Not set while a step is under way: the model runner answers nothing then."""
        self.step_over.set()
        self._turn = asyncio.Lock()
        """What is asked of the model runner is answered in order."""
        self.pixels: dict[str, list[torch.Tensor]] = {}
        """The tensors that the model runner had for each request."""
        self.reader = make_reader()
        self.dead = False
        self._outputs: asyncio.Queue[EngineCoreOutputs | Exception] = asyncio.Queue()

    def add(self, frames: Sequence[Frame]) -> None:
        """What ``workers.engine_inputs.EngineInputs`` does with vLLM's client."""
        # Into memory that may be written to, as what a socket receives.
        request = decode_request([bytearray(frame) for frame in frames])
        self._run_step(request)
        self.added.put_nowait(request)
        if not self.stalled:
            tokens = request.prompt_token_ids or []
            count = request.sampling_params.max_tokens if request.sampling_params else 1
            for position, token in enumerate(tokens[:count]):
                self.say(request.request_id, token, finished=position == count - 1)

    def _run_step(self, request: EngineCoreRequest) -> None:
        new = SimpleNamespace(mm_features=list(request.mm_features or ()))
        self.reader.execute_model(cast("Any", SimpleNamespace(scheduled_new_reqs=[new])))
        self.pixels[request.request_id] = [
            feature.data["pixel_values"].data for feature in new.mm_features
        ]
        self.reader.executed.clear()

    def say(self, request_id: str, *tokens: int, finished: bool = False) -> None:
        reason = FinishReason.LENGTH if finished else None
        output = EngineCoreOutput(request_id, list(tokens), finish_reason=reason)
        self.put(EngineCoreOutputs(outputs=[output]))

    def put(self, outputs: EngineCoreOutputs) -> None:
        self._outputs.put_nowait(outputs)

    def die(self) -> None:
        self.dead = True
        self._outputs.put_nowait(EngineDeadError())

    async def follow(self, on_outputs: Callable[[EngineCoreOutputs], None]) -> None:
        """What ``workers.engine_outputs.follow_engine`` does with vLLM's client."""
        while True:
            outputs = await self._outputs.get()
            if isinstance(outputs, Exception):
                raise outputs
            on_outputs(outputs)

    def abort(self, request_ids: list[str]) -> None:
        self.aborted.put_nowait(list(request_ids))

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        self.called.put_nowait((method, *args))
        answer = self.answers.get(method)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def collective_rpc_async(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        async with self._turn:
            await self.step_over.wait()
            if self.dead:
                raise EngineDeadError()
            if method == "synchronize_device":
                return [None]
            return [getattr(self.reader, method)(*args, **(kwargs or {}))]

    def close(self) -> None:
        for name in list(self.reader._arenas):
            self.reader.detach_arena(name)


class FakeWorker:
    """A worker in this process: all of it but the engine is the shipped code."""

    def __init__(
        self,
        registry: Registry,
        name: str = "worker-1",
        *,
        facts: WorkerFacts | None = None,
        address: str | None = None,
        process: tuple[int, int] | None = None,
        epoch: str = "epoch-1",
        cache_gib: float = 0.0,
        transfer_timeout: float = 5.0,
        embeddings: HostEmbeddings | None = None,
    ) -> None:
        """``process``: the id and start time under which it announces itself.

        ``cache_gib``: for tensors that NIXL pulls; 0: no NIXL.
        """
        self.name = name
        self._process = this_process()
        if process is not None:
            pid, start_time = process
            self._process = Process(
                pid=pid, start_time=start_time, host=self._process.host
            )
        self.facts = facts or make_facts()
        self.engine = FakeEngine()
        self.registry = registry
        sockets = registry.socket_directory(name)
        self._context = zmq.asyncio.Context()
        self.link = WorkerLink(self._context, address or f"ipc://{sockets}/requests")
        self.kv_publisher = KvPublisher(self._context, f"ipc://{sockets}/kv")
        self.kv_state = KvState(self.facts.block_size, epoch)
        self.frontends = Frontends()
        engine = cast("AsyncMPClient", self.engine)
        inputs = cast("EngineInputs", self.engine)
        self.outbox = Outbox(engine, inputs, self.link, self.frontends)
        self.ready = Ready(
            worker=name,
            facts=self.facts,
            epoch=epoch,
            kv_address=self.kv_publisher.address,
            transfer="inline",
            transfer_reason="",
            process=self._process,
        )
        self.nixl = NixlTransfer(cache_gib, transfer_timeout, partial(attach, engine))
        self.inbox = Inbox(
            self.ready,
            engine,
            inputs,
            self.link,
            self.kv_publisher,
            self.kv_state,
            self.frontends,
            self.outbox,
            self.nixl,
            embeddings,
            exports_of(embeddings, self.facts, cache_gib),
        )
        self.load = LoadReporter(
            self.kv_publisher,
            self.kv_state,
            self.frontends,
            self.facts.num_kv_blocks,
            lambda: self.inbox.encoder_resets,
            embeddings,
        )
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def address(self) -> str:
        return self.link.address

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(work)
            for work in (
                self.engine.follow(self._on_outputs),
                self.load.run(),
                self.outbox.confirm_aborts(),
                self.inbox.run(),
            )
        ]

    def _on_outputs(self, outputs: EngineCoreOutputs) -> None:
        self.outbox.deliver(outputs)
        self.load.note(outputs)

    def announce(self) -> None:
        self.registry.announce(
            WorkerRecord(
                worker=self.name,
                address=self.address,
                facts=self.facts,
                **msgspec.structs.asdict(self._process),
            )
        )

    def hold(self, digests: Sequence[bytes]) -> None:
        """Have the engine hold these blocks, and say so."""
        stored = BlockStored(
            block_hashes=list(digests),
            parent_block_hash=None,
            token_ids=[],
            block_size=self.facts.block_size,
            lora_id=None,
            medium="GPU",
            lora_name=None,
        )
        batch = KVEventBatch(ts=0.0, events=[stored])
        delta = self.kv_state.apply(msgspec.msgpack.encode(batch))
        if delta is not None:
            self.kv_publisher.publish(delta)

    async def leave(self) -> None:
        """Stop in good order."""
        self.registry.withdraw_record(self.name)
        self.inbox.say_goodbye()
        await self.stop()

    async def stop(self) -> None:
        """Stop without a word."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError, EngineDeadError):
                await task
        self._tasks.clear()
        if self._context.closed:
            return
        await self.inbox.close()
        await self.nixl.close()
        self.link.close()
        self.kv_publisher.close()
        self._context.term()
        for name in self.frontends.names():
            frontend = self.frontends.get(name)
            if frontend is not None and frontend.view is not None:
                frontend.view.close()  # as the end of a process would
            self.frontends.disconnect(name)
        self.engine.close()

    async def __aenter__(self) -> FakeWorker:
        self.start()
        self.announce()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()
        self.registry.withdraw(self.name)


def handles_on(arena: Arena) -> int:
    """How many open files of this process are the arena's; its owner has two."""
    path = str(SHM / arena.id.name)
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            count += os.readlink(link) == path
    return count
