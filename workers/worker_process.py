"""The process around one vLLM engine.

Starts the engine, announces the worker, moves messages in and out, and on SIGTERM or
Ctrl-C finishes what it has, then takes everything down in the opposite order.

vLLM names relied on: EngineCoreClient.make_async_mp_client, Executor.get_class,
AsyncMPClient.shutdown, collective_rpc_async; EngineCoreOutputs; gc_utils.freeze_gc_heap.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import uvloop
import zmq
import zmq.asyncio
from msgspec.structs import asdict
from vllm.config import VllmConfig
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core_client import AsyncMPClient, EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor

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
from workers.embedding_cache import HostEmbeddings, connector_config, open_embeddings
from workers.embedding_exports import exports_of
from workers.engine_args import engine_config, facts_of
from workers.engine_inputs import EngineInputs
from workers.engine_outputs import follow_engine
from workers.frontends import Frontends
from workers.inbox import Inbox
from workers.kv_state import KvState
from workers.load_report import LoadReporter
from workers.nixl_transfer import NixlTransfer
from workers.outbox import Outbox
from workers.process_death import engines_die_with_us

logger = logging.getLogger(__name__)


def run_worker(settings: WorkerConfig, args: argparse.Namespace) -> int:
    """Run a worker until it is told to stop; returns the exit status.

    Call from the main thread: the engine's processes are tied to it.

    Raises:
        BadSetting, TransferError: the settings cannot work; the text says why.
    """
    registry = open_discovery(settings.discovery, settings.registry, settings.namespace)
    access = worker_access(settings.secure_keys, insecure=settings.insecure)
    if settings.port is not None:
        access.check(f"tcp://{settings.host}:{settings.port}")  # before the engine loads
    worker = f"worker-{os.getpid()}-{secrets.token_hex(3)}"
    sockets = registry.socket_directory(worker)
    embeddings: HostEmbeddings | None = None
    try:
        config = engine_config(args, sockets, connector_config(settings))
        seed = seed_of(registry, settings.mm_identity_seed_file)
        fingerprint = IdentityHasher(seed, "xxh3_128").fingerprint
        embeddings = open_embeddings(settings, config, seed)
        engine = _start_engine(config, sockets)
        try:
            facts = facts_of(config, fingerprint)
            # Going through all that vLLM has imported takes the collector 0.4 s, in which
            # no token gets out.
            freeze_gc_heap()
            return uvloop.run(
                _serve(
                    settings, registry, access, worker, sockets, config, engine, facts,
                    embeddings,
                )
            )
        finally:
            engine.shutdown(timeout=config.shutdown_timeout)
    finally:
        if embeddings is not None:
            embeddings.leave()
        registry.withdraw(worker)
        registry.close()


def _start_engine(config: VllmConfig, sockets: Path) -> AsyncMPClient:
    # vLLM's own sockets go where ours are, so that one removal takes them all.
    os.environ["VLLM_RPC_BASE_PATH"] = str(sockets)
    # Digests whole: shortened to 64 bits they would not be the engine's own.
    os.environ["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] = "0"
    signal.signal(signal.SIGTERM, _interrupt)
    logger.info("starting the engine for %s", config.model_config.model)
    # torch leaves a rendezvous file in the engine's temporary directory.
    with _environment(TMPDIR=str(sockets)), engines_die_with_us():
        return EngineCoreClient.make_async_mp_client(
            config, Executor.get_class(config), log_stats=True
        )


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Within, processes that are started see these variables."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _interrupt(*_: object) -> None:
    """Before the event loop runs: unwind, so that what was started is stopped."""
    raise KeyboardInterrupt


async def _serve(
    settings: WorkerConfig,
    registry: Discovery,
    access: Access,
    worker: str,
    sockets: Path,
    config: VllmConfig,
    engine: AsyncMPClient,
    facts: WorkerFacts,
    embeddings: HostEmbeddings | None,
) -> int:
    loop = asyncio.get_running_loop()
    signals = StopSignals()
    context = zmq.asyncio.Context()
    if settings.port is None:
        addresses = (f"ipc://{sockets}/requests", f"ipc://{sockets}/kv")
    else:
        addresses = (f"tcp://{settings.host}:{settings.port}", f"tcp://{settings.host}:*")
    authenticator = Authenticator(context, access)
    try:
        link = WorkerLink(context, addresses[0], access)
        kv_publisher = KvPublisher(context, addresses[1], access)
    except zmq.ZMQError as error:
        raise BadSetting(f"cannot listen on {addresses[0]}: {error}") from error

    epoch = secrets.token_hex(8)
    process = this_process()
    ready = Ready(
        worker=worker,
        facts=facts,
        epoch=epoch,
        kv_address=kv_publisher.address,
        transfer="inline",
        transfer_reason="",
        process=process,
    )
    kv_state = KvState(
        facts.block_size, epoch, drops_last_match=facts.drops_last_matched_block
    )
    frontends = Frontends()
    inputs = EngineInputs(engine)
    outbox = Outbox(engine, inputs, link, frontends)
    nixl = NixlTransfer(
        settings.mm_worker_cache_gb, settings.mm_transfer_timeout, partial(attach, engine)
    )
    inbox = Inbox(
        ready, engine, inputs, link, kv_publisher, kv_state, frontends, outbox, nixl,
        embeddings, exports_of(embeddings, facts, settings.mm_worker_cache_gb),
    )

    load = LoadReporter(
        kv_publisher, kv_state, frontends, facts.num_kv_blocks,
        lambda: inbox.encoder_resets, embeddings,
    )

    def on_outputs(outputs: EngineCoreOutputs) -> None:
        load.note_embeddings(outputs)
        outbox.deliver(outputs)
        load.note(outputs)

    work = [
        loop.create_task(follow_engine(engine, on_outputs), name="outputs"),
        loop.create_task(load.run(), name="load reports"),
        loop.create_task(outbox.confirm_aborts(), name="aborts"),
        loop.create_task(outbox.watch_engine(), name="engine"),
        loop.create_task(inbox.run(), name="inbox"),
        loop.create_task(inbox.drop_silent_frontends(), name="silent frontends"),
        loop.create_task(
            _follow_kv_events(context, f"ipc://{sockets}/kv-events", kv_state, kv_publisher),
            name="KV events",
        ),
    ]
    registry.announce(
        WorkerRecord(
            worker=worker, address=announced_address(link.address, settings.discovery),
            facts=facts, **asdict(process),
        )
    )
    logger.info("worker %s is ready on %s", worker, link.address)
    stop = loop.create_task(signals.first.wait(), name="stop")
    done, _ = await asyncio.wait([stop, *work], return_when=asyncio.FIRST_COMPLETED)
    if done == {stop}:
        done |= await drain(
            [(inbox, frontends)], settings.drain_timeout, signals.second, work
        )
    registry.withdraw_record(worker)
    inbox.say_goodbye()
    status = 0
    for task in done - {stop}:
        status = 1
        cause = None if task.cancelled() else task.exception()
        if isinstance(cause, EngineDeadError):
            logger.error("the engine has died")
        else:
            logger.error("%s ended", task.get_name(), exc_info=cause)
    for task in [stop, *work]:
        task.cancel()
    await asyncio.gather(stop, *work, return_exceptions=True)
    await inbox.close()
    await nixl.close()
    link.close()
    kv_publisher.close()
    authenticator.close()
    context.term()
    return status


async def attach(engine: AsyncMPClient, name: str, nonce: bytes) -> str:
    """Have all processes of the engine map an arena; returns why one cannot."""
    refusals: list[str] = await engine.collective_rpc_async("attach_arena", args=(name, nonce))
    return next(filter(None, refusals), "")


async def _follow_kv_events(
    context: zmq.asyncio.Context, endpoint: str, state: KvState, publisher: KvPublisher
) -> None:
    """Keep ``state`` equal to the engine's cache and tell the frontends."""
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(endpoint)
    expected = None
    try:
        while True:
            _, number, batch = await socket.recv_multipart()
            received = int.from_bytes(number, "big")
            if expected is not None and received != expected:
                # Blocks that stay resident are not announced again: forget them all
                # rather than promise what may be gone.
                logger.error("%d batches of KV events were lost", received - expected)
                if (delta := state.clear()) is not None:
                    publisher.publish(delta)
            expected = received + 1
            if (delta := state.apply(batch)) is not None:
                publisher.publish(delta)
    finally:
        socket.close(linger=0)


