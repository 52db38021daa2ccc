"""vLLM's app over our renderer and cache, in this process, with no worker behind it."""

from __future__ import annotations

import logging
import random
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pybase64
import pytest
from prometheus_client import CollectorRegistry
from vllm.entrypoints.launchers.api_server import entry
from vllm.renderers.base import BaseRenderer

from configs.demo.checkpoint import write_checkpoint
from frontend.arena_cache import ArenaProcessorCache, IdentifiedItem
from frontend.command_line import parse
from frontend.engine_client import RoutedEngineClient
from frontend.media.connector import register_connector
from frontend.media.remote_media import RemoteMedia
from frontend.media.url_cache import UrlCache
from frontend.media.url_policy import UrlPolicy
from frontend.metrics import FrontendMetrics
from frontend.nixl_offers import NixlOffers
from frontend.router.cost import RouterSettings
from frontend.router.router import Router
from frontend.vllm_seams import RoutedLLM, frontend_config, make_llm
from frontend.worker_pool import WorkerPool
from tests.fakes import HASHER
from transfer.arena import Arena
from transfer.messages import PROTOCOL_VERSION, Hello
from transfer.registry import Registry

CHECKPOINT = Path(__file__).parents[2] / ".demo" / "checkpoint"

APP_MARKS = [
    pytest.mark.anyio,
    # vLLM's own app uses what its own protocol deprecates.
    pytest.mark.filterwarnings("ignore:max_tokens is deprecated:DeprecationWarning"),
]
"""Of tests that use the app."""


@dataclass
class App:
    """What it is asked to render comes back as the request that an engine would get."""

    http: httpx.AsyncClient
    cache: ArenaProcessorCache
    renderer: BaseRenderer[Any]
    llm: RoutedLLM
    arena: Arena

    async def render(self, *parts: dict[str, Any], **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/chat/completions/render", json=body(parts, fields))

    async def rendered(self, *parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
        """Token ids, hashes and placeholders of a request that must succeed."""
        response = await self.render(*parts, **fields)
        assert response.status_code == 200, response.text
        answer = response.json()
        features = answer["features"]
        return {
            "token_ids": answer["token_ids"],
            "mm_hashes": features["mm_hashes"],
            "mm_placeholders": features["mm_placeholders"],
        }

    def identities(self, rendered: dict[str, Any]) -> list[str]:
        """What the tensors of its images are, by their digests."""
        items = [
            self.cache.get_and_update_item(None, mm_hash)[0]
            for mm_hash in rendered["mm_hashes"]["image"]
        ]
        return [item.identity for item in items if isinstance(item, IdentifiedItem)]

    async def chat(self, *parts: dict[str, Any], **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/chat/completions", json=body(parts, fields))


def body(parts: tuple[dict[str, Any], ...], fields: dict[str, Any]) -> dict[str, Any]:
    text = {"type": "text", "text": "What is this?"}
    return {
        "model": str(CHECKPOINT),
        "messages": [{"role": "user", "content": [*parts, text]}],
        **fields,
    }


def by_url(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **fields}


def in_place(data: bytes, **fields: Any) -> dict[str, Any]:
    return by_url(f"data:image/any;base64,{pybase64.b64encode(data).decode()}", **fields)


@asynccontextmanager
async def running_app(model: Path = CHECKPOINT, *more_flags: str) -> AsyncIterator[App]:
    if model == CHECKPOINT:
        write_checkpoint(CHECKPOINT)
    flags = ("--enable-scale-out", "--trust-request-mm-kwargs", *more_flags)
    _, args = parse(["--model", str(model), *flags])
    config = frontend_config(args)
    arena = Arena(64 << 20)
    cache = ArenaProcessorCache(arena, HASHER, config.model_config.model)
    client = RoutedEngineClient(
        supported_tasks=("generate",),
        cache=cache,
        arena=arena,
        router=Router("kv", RouterSettings(), time.monotonic, random.Random(1)),
        metrics=FrontendMetrics(CollectorRegistry()),
        worker_wait_timeout=0.0,
    )
    policy = UrlPolicy([], allow_private=True)
    remote = RemoteMedia(policy, UrlCache(1 << 20))
    register_connector(remote, policy)
    level = logging.root.level
    llm = make_llm(config, args, client, cache)
    directory = tempfile.mkdtemp(prefix="fv-")
    hello = Hello(
        frontend="app", protocol=PROTOCOL_VERSION, arena=arena.id, transfer="inline",
        identity_seed_fingerprint="",
    )
    registry = Registry(Path(directory), "app")
    nixl = NixlOffers(arena, "inline")
    client.start(WorkerPool(hello, registry, (), {}, client, nixl), llm.learn)
    try:
        app = entry.__dict__["build_app"](args, ("generate",), config.model_config)
        await entry.__dict__["init_app_state"](llm, app.state, args, ("generate",))
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://frontend", timeout=60
        ) as http:
            yield App(http, cache, llm.renderer, llm, arena)
    finally:
        llm.shutdown()
        await client.closed()
        await remote.close()
        shutil.rmtree(directory)
        arena.close()
        logging.root.setLevel(level)  # some part of vLLM's app raises it for all
