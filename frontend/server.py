"""HTTP in: vLLM's own OpenAI server around our engine client.

vLLM names relied on: launchers.api_server.entry.build_and_serve;
launchers.launcher.setup_server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import random
import secrets
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from prometheus_client import REGISTRY
from vllm.config import VllmConfig
from vllm.entrypoints.launchers.api_server.entry import build_and_serve
from vllm.entrypoints.launchers.launcher import setup_server

from configs.flags import BadSetting
from configs.schema import FrontendConfig
from frontend.admission import Admission, FleetLoad, limits_from
from frontend.arena_cache import ArenaProcessorCache
from frontend.dashboard.routes import STATE_PATH
from frontend.dashboard.state import FrontendState
from frontend.draining import LAST_SECONDS, HttpDrain
from frontend.embedding_checks import limits_of
from frontend.engine_client import RoutedEngineClient
from frontend.media.connector import register_connector
from frontend.media.metrics import UrlCacheCollector
from frontend.media.remote_media import RemoteMedia
from frontend.media.url_cache import UrlCache
from frontend.media.url_policy import UrlPolicy
from frontend.metrics import FleetCollector, FrontendMetrics
from frontend.nixl_offers import NixlOffers
from frontend.preprocess.messages import Setup
from frontend.preprocess.pool import PreprocessPool, begin_preprocessing
from frontend.preprocess.renderer_seam import preprocess_beside
from frontend.request_log import RequestLog
from frontend.request_spans import RequestSpans
from frontend.router.cost import RouterSettings
from frontend.router.router import Router
from frontend.shown_routes import shown_routes
from frontend.siblings import Siblings
from frontend.tracing import trace_rendering, tracer
from frontend.vllm_seams import frontend_config, make_llm, our_app, supported_tasks
from frontend.worker_pool import WorkerPool
from transfer.access import frontend_access
from transfer.arena import Arena
from transfer.arena_file import sweep_dead_arenas
from transfer.discovery import open_discovery, seed_of
from transfer.embeddings.home import EmbeddingHome, sweep_dead_homes
from transfer.engine_facts import shared_facts
from transfer.errors import TransferError
from transfer.identity import IdentityHasher
from transfer.messages import PROTOCOL_VERSION, Hello

logger = logging.getLogger(__name__)

GIB = 1 << 30
SHM = Path("/dev/shm")


async def serve(
    settings: FrontendConfig,
    args: argparse.Namespace,
    arguments: Sequence[str],
    siblings: Siblings,
) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish what has begun.

    ``arguments`` is what the first two were made from.

    Raises:
        BadSetting, TransferError: the settings cannot work; the text says why.
    """
    try:
        listen_address, sock = setup_server(args, reuse_port=settings.frontends > 1)
    except OSError as error:
        raise BadSetting(f"cannot listen on port {args.port}: {error.strerror}") from error
    registry = open_discovery(settings.discovery, settings.registry, settings.namespace)
    access = frontend_access(settings.secure_keys)
    config = frontend_config(args)
    if config.model_config.runner_type != "generate":
        raise BadSetting(f"{args.model} does not generate text; only such models are routed")
    seed = seed_of(registry, settings.mm_identity_seed_file)
    hasher = IdentityHasher(seed, settings.mm_identity_hash)
    url_cache = UrlCache(int(settings.mm_url_cache_gb * GIB))
    url_policy = UrlPolicy(
        args.allowed_media_domains or (), settings.mm_url_private_addresses == "allow"
    )
    remote_media = RemoteMedia(url_policy, url_cache)
    thumbnails = settings.dashboard_thumbnails == "on"
    register_connector(remote_media, url_policy, keep_pictures=thumbnails)
    arena = _make_arena(settings, config)
    home = _join_embeddings(seed, settings.namespace)
    preprocessing: PreprocessPool | None = None
    try:
        cache = ArenaProcessorCache(arena, hasher, config.model_config.model)
        if arena is not None:
            setup = Setup(
                tuple(arguments), arena.id, seed, settings.mm_identity_hash,
                settings.mm_preprocess_priority,
            )
            preprocessing = begin_preprocessing(settings, setup, arena, cache)
        router = _make_router(settings)
        metrics = FrontendMetrics()
        traced = args.otlp_traces_endpoint is not None
        spans = RequestSpans(tracer()) if traced else None
        log = RequestLog(metrics, settings.dashboard_requests, spans)
        client = RoutedEngineClient(
            supported_tasks=supported_tasks(config.model_config),
            cache=cache,
            arena=arena,
            router=router,
            metrics=metrics,
            worker_wait_timeout=settings.worker_wait_timeout,
            migration_limit=settings.migration_limit,
            embeddings=limits_of(config.model_config),
            log=log,
        )
        llm = make_llm(config, args, client, cache)
        hello = Hello(
            frontend=f"frontend-{os.getpid()}-{secrets.token_hex(4)}",
            protocol=PROTOCOL_VERSION,
            arena=arena.id if arena is not None else None,
            transfer=settings.mm_transfer,
            identity_seed_fingerprint=hasher.fingerprint,
        )
        nixl = NixlOffers(arena, settings.mm_transfer)
        pool = WorkerPool(
            hello, registry, settings.worker, shared_facts(config), client, nixl, access
        )
        client.start(pool, llm.learn, llm.end_request)
        REGISTRY.register(FleetCollector(pool, router, cache, arena, nixl, metrics))
        REGISTRY.register(UrlCacheCollector(url_cache.stats))
        try:
            if preprocessing is not None:
                await preprocessing.start()
                preprocess_beside(llm.renderer, preprocessing, cache)
            if traced:
                trace_rendering(llm.renderer)
            state = FrontendState(client, siblings.number, thumbnails)
            routes = await shown_routes(settings, client, state, siblings)
            quiet = [args.disable_access_log_for_endpoints, STATE_PATH]  # asked each second
            args.disable_access_log_for_endpoints = ",".join(filter(None, quiet))
            admission = Admission(limits_from(settings), llm, lambda: fleet_load(client))
            llm.drain = HttpDrain(settings.drain_timeout)
            with our_app(routes, admission, llm.drain, traced=traced):
                shutdown = await build_and_serve(llm, listen_address, sock, args)
            with contextlib.suppress(TimeoutError):  # of clients that do not read
                async with asyncio.timeout(LAST_SECONDS):
                    await shutdown
        finally:
            siblings.close()
            llm.shutdown()
            await client.closed()
            await remote_media.close()
            sock.close()
    finally:
        if preprocessing is not None:
            await preprocessing.close()
        if arena is not None:
            arena.close()
        if home is not None:
            home.leave()
        registry.close()


def _join_embeddings(seed: bytes, namespace: str) -> EmbeddingHome | None:
    """Keep what workers of this host share in place while they are restarted."""
    try:
        home = EmbeddingHome(seed, namespace)
    except (TransferError, OSError) as error:
        logger.warning("the workers' embedding cache is not kept from here: %s", error)
        return None
    for name in sweep_dead_homes():  # not what this deployment itself left behind
        logger.info("removed %s, left by processes that are gone", name)
    return home


def fleet_load(client: RoutedEngineClient) -> FleetLoad:
    """What the ready workers have in flight, as far as it is known here."""
    book = client.router.load
    loads = [book.load(name) for name in client.pool.ready_workers()]
    return FleetLoad(
        workers=len(loads),
        requests=sum(load.requests for load in loads),
        own_requests=len(book),
        prefill_tokens=sum(load.prefill_tokens for load in loads) + client.waiting_tokens,
    )


def _make_router(settings: FrontendConfig) -> Router:
    return Router(
        settings.router_mode,
        RouterSettings(
            overlap_score_credit=settings.router_kv_overlap_score_credit,
            prefill_load_scale=settings.router_prefill_load_scale,
            temperature=settings.router_temperature,
            encoder_load_scale=settings.router_encoder_load_scale,
        ),
        time.monotonic,
        random.Random(),
    )


def _make_arena(settings: FrontendConfig, config: VllmConfig) -> Arena | None:
    """The shared memory of this frontend; None for text-only models or where asked."""
    for name in sweep_dead_arenas():
        logger.info("removed %s, left by a process that is gone", name)
    if not config.model_config.supports_multimodal_inputs or settings.mm_arena_gb == 0:
        return None
    gib = settings.mm_arena_gb
    if gib is None:
        gib = min(4.0, shutil.disk_usage(SHM).free / 2 / GIB) / settings.frontends
    logger.info("taking %.2f GiB of %s for processed images", gib, SHM)
    return Arena(int(gib * GIB))
