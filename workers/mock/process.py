"""A process of mock workers: the shipped inbox, outbox and links before mock engines.

vLLM names relied on: AsyncMPClient, by name only; VllmConfig.cache_config,
scheduler_config.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import uvloop
import zmq
import zmq.asyncio
from msgspec.structs import asdict

from configs.flags import BadSetting
from configs.schema import WorkerConfig
from transfer.access import Access, Authenticator, worker_access
from transfer.discovery import Discovery, announced_address, open_discovery, seed_of
from transfer.identity import IdentityHasher
from transfer.link import KvPublisher, WorkerLink
from transfer.messages import Ready, WorkerFacts
from transfer.process import this_process
from transfer.registry import WorkerRecord
from workers.draining import StopSignals, drain
from workers.engine_args import engine_config, facts_of
from workers.frontends import Frontends
from workers.inbox import Inbox
from workers.kv_state import KvState
from workers.load_report import LoadReporter
from workers.mock.block_pool import BlockEvent
from workers.mock.engine import EngineLimits, MockEngine
from workers.mock.engine_client import MockEngineClient
from workers.mock.kv_events import encode_events
from workers.mock.requests import RequestReader
from workers.nixl_transfer import NixlTransfer
from workers.outbox import Outbox
from workers.worker_process import attach

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.core_client import AsyncMPClient

    from workers.engine_inputs import EngineInputs

logger = logging.getLogger(__name__)

DEFAULT_NUM_BLOCKS = 4096
"""KV blocks of a mock engine without ``--num-gpu-blocks-override``."""


def run_mock_workers(settings: WorkerConfig, args: argparse.Namespace) -> int:
    """Run ``settings.mock_workers`` workers until told to stop; returns the exit status.

    Raises:
        BadSetting, TransferError: the settings cannot work; the text says why.
    """
    registry = open_discovery(settings.discovery, settings.registry, settings.namespace)
    access = worker_access(settings.secure_keys, insecure=settings.insecure)
    if settings.port is not None:
        access.check(f"tcp://{settings.host}:{settings.port}")
    prefix = f"mock-worker-{os.getpid()}-{secrets.token_hex(3)}"
    names = [f"{prefix}-{number}" for number in range(1, settings.mock_workers + 1)]
    sockets = {name: registry.socket_directory(name) for name in names}
    try:
        config = engine_config(args, sockets[names[0]])
        config.cache_config.num_gpu_blocks = (
            config.cache_config.num_gpu_blocks_override or DEFAULT_NUM_BLOCKS
        )
        fingerprint = IdentityHasher(
            seed_of(registry, settings.mm_identity_seed_file), "xxh3_128"
        ).fingerprint
        facts = facts_of(config, fingerprint, engine="mock")
        logger.warning("%d mock workers: answers are made up, not computed", len(names))
        return uvloop.run(_serve(settings, registry, access, sockets, facts))
    finally:
        for name in names:
            registry.withdraw(name)
        registry.close()


async def _serve(
    settings: WorkerConfig,
    registry: Discovery,
    access: Access,
    sockets: dict[str, Path],
    facts: WorkerFacts,
) -> int:
    loop = asyncio.get_running_loop()
    signals = StopSignals()
    context = zmq.asyncio.Context()
    authenticator = Authenticator(context, access)
    workers = [
        MockWorker(
            context, name, facts, _addresses(settings, place, directory), settings, access
        )
        for place, (name, directory) in enumerate(sockets.items())
    ]
    tasks = [task for worker in workers for task in worker.start()]
    for worker in workers:
        registry.announce(worker.record())
        logger.info("mock worker %s is ready on %s", worker.name, worker.link.address)
    stop = loop.create_task(signals.first.wait(), name="stop")
    done, _ = await asyncio.wait([stop, *tasks], return_when=asyncio.FIRST_COMPLETED)
    if done == {stop}:
        drained = [(worker.inbox, worker.frontends) for worker in workers]
        done |= await drain(drained, settings.drain_timeout, signals.second, tasks)
    for worker in workers:
        registry.withdraw_record(worker.name)
        worker.inbox.say_goodbye()
    for task in done - {stop}:
        logger.error("%s ended", task.get_name(), exc_info=task.exception())
    for task in [stop, *tasks]:
        task.cancel()
    await asyncio.gather(stop, *tasks, return_exceptions=True)
    for worker in workers:
        worker.close()
    authenticator.close()
    context.term()
    return 1 if done - {stop} else 0


@dataclass(frozen=True)
class Addresses:
    """Where one worker listens."""

    requests: str
    kv: str


def _addresses(settings: WorkerConfig, place: int, directory: Path) -> Addresses:
    if settings.port is None:
        return Addresses(f"ipc://{directory}/requests", f"ipc://{directory}/kv")
    port = settings.port + place if settings.port else 0
    return Addresses(f"tcp://{settings.host}:{port}", f"tcp://{settings.host}:*")


class MockWorker:
    """One worker: all of it but the engine is what a worker of vLLM's engine runs."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        name: str,
        facts: WorkerFacts,
        addresses: Addresses,
        settings: WorkerConfig,
        access: Access,
    ) -> None:
        """
        Raises:
            BadSetting, TransferError: it cannot or must not listen there.
        """
        self.name = name
        self.facts = facts
        try:
            self.link = WorkerLink(context, addresses.requests, access)
            self.kv_publisher = KvPublisher(context, addresses.kv, access)
        except zmq.ZMQError as error:
            raise BadSetting(f"cannot listen on {addresses.requests}: {error}") from error
        self.engine = MockEngineClient(
            MockEngine(limits_of(facts)),
            RequestReader(facts.block_size, facts.hash_algorithm, facts.max_model_len),
            settings.mock_speed,
        )
        client, inputs = cast("AsyncMPClient", self.engine), cast("EngineInputs", self.engine)
        self.address = announced_address(self.link.address, settings.discovery)
        epoch = secrets.token_hex(8)
        ready = Ready(
            worker=name, facts=facts, epoch=epoch, kv_address=self.kv_publisher.address,
            transfer="inline", transfer_reason="", process=this_process(),
        )
        self.kv_state = KvState(facts.block_size, epoch)
        frontends = self.frontends = Frontends()
        self.outbox = Outbox(client, inputs, self.link, frontends)
        # A mock reads no tensors, so it pulls none.
        nixl = NixlTransfer(0, settings.mm_transfer_timeout, partial(attach, client))
        self.inbox = Inbox(
            ready, client, inputs, self.link, self.kv_publisher, self.kv_state, frontends,
            self.outbox, nixl,
        )
        self.load = LoadReporter(
            self.kv_publisher, self.kv_state, frontends, facts.num_kv_blocks,
            lambda: self.inbox.encoder_resets,
        )

    def start(self) -> list[asyncio.Task[None]]:
        """Begin to work; none of the tasks ends by itself."""
        create = asyncio.get_running_loop().create_task
        return [
            create(
                self.engine.run(self._on_outputs, self._publish),
                name=f"engine of {self.name}",
            ),
            create(self.load.run(), name=f"load reports of {self.name}"),
            create(self.outbox.confirm_aborts(), name=f"aborts of {self.name}"),
            create(self.inbox.run(), name=f"inbox of {self.name}"),
            create(
                self.inbox.drop_silent_frontends(), name=f"silent frontends of {self.name}"
            ),
        ]

    def record(self) -> WorkerRecord:
        """What the registry shows of it."""
        return WorkerRecord(
            worker=self.name, address=self.address, facts=self.facts, **asdict(this_process())
        )

    def close(self) -> None:
        self.link.close()
        self.kv_publisher.close()

    def _on_outputs(self, outputs: EngineCoreOutputs) -> None:
        self.outbox.deliver(outputs)
        self.load.note(outputs)

    def _publish(self, events: list[BlockEvent]) -> None:
        delta = self.kv_state.apply(encode_events(events, self.facts.block_size))
        if delta is not None:
            self.kv_publisher.publish(delta)


def limits_of(facts: WorkerFacts) -> EngineLimits:
    """The limits of an engine that states these facts."""
    return EngineLimits(
        num_blocks=facts.num_kv_blocks,
        block_size=facts.block_size,
        max_num_seqs=facts.max_num_seqs,
        max_num_batched_tokens=facts.max_num_batched_tokens,
        encoder_cache_tokens=facts.encoder_cache_tokens,
    )
