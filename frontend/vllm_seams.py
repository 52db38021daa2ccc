"""Where our parts are put into vLLM's server.

vLLM makes its engine client, its processor caches and its app by calling functions by
name. They are replaced for the moment of construction, here and nowhere else, so that
vLLM itself registers our ``close`` and our statistics.

vLLM names relied on: EngineCoreClient.make_async_mp_client (called by
AsyncLLM.__init__); renderers.base.processor_cache_from_config and
processor_only_cache_from_config (called by BaseRenderer.__init__);
launchers.api_server.entry.build_app (called by build_and_serve);
launchers.launcher.serve_http (sets app.state.server; calls the engine client's shutdown
from another thread before it ends the HTTP server);
BaseRenderer._process_mm_uuids, start_mm_warmup_in_background, mm_processor and its
info.parse_mm_data; BaseMultiModalProcessor.apply (called by
BaseRenderer._process_multimodal); BaseRenderer._tokenize_prompt, _tokenize_prompt_async,
_wants_offsets, _build_tokens_prompt, _executor; TokenizeParams.get_encode_kwargs;
async_utils.make_async; renderers.chat_utils.load_chat_template;
exceptions.VLLMValidationError; AsyncLLM.check_health, _add_request;
OutputProcessor.request_states, abort_requests; RequestState.queue (put, request_id: of an
exception, generate() raises it);
InputProcessor.mm_encoder_cache_size; AsyncEngineArgs.create_model_config.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from vllm.config import ModelConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server import entry
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.cache import BaseMultiModalProcessorCache
from vllm.renderers import base as renderers_base
from vllm.renderers.chat_utils import BaseMultiModalItemTracker, load_chat_template
from vllm.tasks import SupportedTask
from vllm.usage.usage_lib import UsageContext
from vllm.utils.async_utils import make_async
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor

from configs.flags import BadSetting, sentence_of
from frontend.admission import Admission
from frontend.admission_middleware import AdmissionMiddleware
from frontend.draining import HttpDrain, OpenRequestsMiddleware
from frontend.embedding_checks import EmbeddingLimits, check_embedding_data, limits_of
from frontend.engine_client import RoutedEngineClient
from frontend.json_body import json_of
from frontend.media.lazy_image import ImageUnreadable
from frontend.placeholder_checks import check_placeholders, image_token_of
from frontend.receipt import ReceiptMiddleware
from frontend.segment_tokenizer import SHORTEST_TEXT, segment_tokenizer
from frontend.short_prompts import stay_on_the_loop
from frontend.spared_work import ask_nothing_about_no_items, one_processor_for_chats
from frontend.tracing import TracingMiddleware
from transfer.messages import WorkerFacts

BUSIEST = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
)
"""Paths of vLLM's app that come before all others: for each request routes are gone through
twice, once for the metrics."""


class RoutedLLM(AsyncLLM):
    """vLLM's AsyncLLM over a fleet: healthy when a worker is ready."""

    drain: HttpDrain | None = None
    """What is to happen before anything is shut down."""

    async def check_health(self) -> None:
        await super().check_health()
        client = self.engine_core
        if not isinstance(client, RoutedEngineClient) or not client.pool.ready_workers():
            raise EngineDeadError()

    async def _add_request(self, request: EngineCoreRequest, *args: Any) -> None:
        try:
            await super()._add_request(request, *args)
        except BaseException:
            # vLLM has counted it by now, and expects an engine client never to refuse.
            await self.abort(request.request_id, internal=True)
            raise

    def shutdown(self, timeout: float | None = None) -> None:
        if self.drain is not None and not _on_an_event_loop():
            self.drain.wait()
        super().shutdown(timeout=timeout)

    def end_request(self, request_id: str, error: Exception) -> None:
        """End a request with an error whose text reaches its client.

        With all of its siblings where ``n`` is above 1: they are one answer.
        """
        state = self.output_processor.request_states.get(request_id)
        if state is None or state.queue is None:
            return
        state.queue.put(error)
        siblings = self.output_processor.abort_requests(
            [state.queue.request_id], internal=True
        )
        client = self.engine_core
        if isinstance(client, RoutedEngineClient):
            client.requests.abort(siblings)

    def learn(self, facts: WorkerFacts) -> None:
        """Take over what only a running engine knows."""
        self.model_config.max_model_len = min(
            self.model_config.max_model_len, facts.max_model_len
        )
        cache = self.vllm_config.cache_config
        cache.block_size, cache.num_gpu_blocks = facts.block_size, facts.num_kv_blocks
        if facts.encoder_cache_tokens:
            self.input_processor.mm_encoder_cache_size = facts.encoder_cache_tokens


def _on_an_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class FrontendEngineArgs(AsyncEngineArgs):
    """vLLM's engine flags as a process that runs no model understands them."""

    def create_model_config(self) -> ModelConfig:
        config = super().create_model_config()
        # No weights are loaded here, and this host may lack the kernels.
        config.quantization = None
        return config


def frontend_config(args: Any) -> VllmConfig:
    """The configuration of the renderer, from vLLM's flags.

    Raises:
        BadSetting: vLLM finds no sense in them.
    """
    engine_args = FrontendEngineArgs.from_cli_args(args)
    try:
        config = engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    except (ValueError, OSError) as error:
        raise BadSetting(sentence_of(error)) from error
    # With neither a processor cache nor prefix caching vLLM would not hash images.
    config.cache_config.enable_prefix_caching = True
    return config


def supported_tasks(model: ModelConfig) -> tuple[SupportedTask, ...]:
    """What engines of this model will say they can do, without asking one."""
    tasks: list[SupportedTask] = ["generate"]
    if getattr(model._model_info, "supports_transcription", False):
        tasks.append("transcription")
    return tuple(tasks)


def make_llm(
    config: VllmConfig,
    args: Any,
    client: RoutedEngineClient,
    cache: BaseMultiModalProcessorCache | None,
) -> RoutedLLM:
    """Make vLLM's AsyncLLM around our engine client and processor cache."""

    def make_client(*_: Any, renderer: Any = None, **__: Any) -> RoutedEngineClient:
        if renderer is not None:
            renderer.start_mm_warmup_in_background()
        return client

    def use_cache(_: VllmConfig) -> BaseMultiModalProcessorCache | None:
        return cache if config.model_config.supports_multimodal_inputs else None

    with (
        _replaced(EngineCoreClient, "make_async_mp_client", staticmethod(make_client)),
        _replaced(renderers_base, "processor_cache_from_config", use_cache),
        _replaced(renderers_base, "processor_only_cache_from_config", use_cache),
    ):
        llm = RoutedLLM(
            vllm_config=config,
            executor_class=Executor.get_class(config),  # asked for, and then not used
            log_requests=args.enable_log_requests,
            aggregate_engine_logging=args.aggregate_engine_logging,
            log_stats=not args.disable_log_stats,
            usage_context=UsageContext.OPENAI_API_SERVER,
        )
    _separate_uuids(llm.renderer)
    _name_what_is_wrong(llm.renderer, image_token_of(config.model_config.hf_config))
    _check_embeddings(llm.renderer, limits_of(config.model_config))
    _reuse_tokenization(llm.renderer)
    stay_on_the_loop(llm.renderer, load_chat_template(args.chat_template))
    if llm.renderer.mm_processor is not None:
        ask_nothing_about_no_items(llm.renderer.mm_processor)
    return llm


def _check_embeddings(renderer: Any, limits: EmbeddingLimits) -> None:
    """Have embeddings that clients send checked before anything is done with them."""
    if renderer.mm_processor is None:
        return
    info = renderer.mm_processor.info
    parse: Callable[..., Any] = info.parse_mm_data

    def check_and_parse(mm_data: Mapping[str, Any], **kwargs: Any) -> Any:
        check_embedding_data(mm_data, limits)
        return parse(mm_data, **kwargs)

    info.parse_mm_data = check_and_parse


def _separate_uuids(renderer: Any) -> None:
    """Give uuids that clients choose a key space of their own in the processor cache.

    vLLM uses them as they are: one that equals some picture's hash would answer for it.
    """
    process: Callable[..., Any] = renderer._process_mm_uuids

    def process_and_mark(*args: Any, **kwargs: Any) -> dict[str, list[str | None]]:
        return {
            modality: [None if uuid is None else f"uuid:{uuid}" for uuid in uuids]
            for modality, uuids in process(*args, **kwargs).items()
        }

    renderer._process_mm_uuids = process_and_mark


def _name_what_is_wrong(renderer: Any, image_token: int | None) -> None:
    """Answer for what clients send with its cause, which vLLM's processor does not name.

    An image that turns out to be damaged is answered as if it had been decoded at once: it
    is decoded within the processor, whose error would say anything but that.
    """
    processor = renderer.mm_processor
    if processor is None:
        return
    apply: Callable[..., Any] = processor.apply

    def apply_and_name(*args: Any, **kwargs: Any) -> Any:
        try:
            processed = apply(*args, **kwargs)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None:
                if isinstance(cause, ImageUnreadable):
                    raise cause from None
                cause = cause.__cause__ or cause.__context__
            if type(error) is ValueError and isinstance(error.__cause__, ValueError):
                text = f"The model's processor refuses an item: {error.__cause__}"
                raise VLLMValidationError(text) from error
            raise
        if image_token is not None:
            check_placeholders(processed, image_token)
        return processed

    processor.apply = apply_and_name


def _reuse_tokenization(renderer: Any) -> None:
    """Tokenize only what is new in a long chat, where the tokenizer allows that."""
    segments = segment_tokenizer(renderer.tokenizer)
    if segments is None:
        return
    tokenize_all: Callable[..., Any] = renderer._tokenize_prompt

    def tokenize(prompt: Any, params: Any) -> Any:
        text, how = prompt["prompt"], params.get_encode_kwargs()
        if (
            len(text) < SHORTEST_TEXT
            or how["add_special_tokens"]
            or renderer._wants_offsets(prompt, params)
        ):
            return tokenize_all(prompt, params)
        token_ids = segments.encode(text)
        if how["truncation"] and len(token_ids) > how["max_length"]:
            return tokenize_all(prompt, params)
        return renderer._build_tokens_prompt(token_ids, prompt)

    renderer._tokenize_prompt = tokenize
    renderer._tokenize_prompt_async = make_async(tokenize, executor=renderer._executor)


@contextmanager
def our_app(
    routes: APIRouter, admission: Admission, drain: HttpDrain, *, traced: bool = False
) -> Iterator[None]:
    """Within, the app that vLLM builds has our routes, response headers and admission.

    And its bodies are parsed by ``json_body``, and its chats share a processor.

    Our routes come before vLLM's. ``drain`` will let it finish its responses. ``traced``:
    requests get OpenTelemetry spans.
    """
    # The last is the outermost.
    middleware = [
        ReceiptMiddleware, *([TracingMiddleware] if traced else []),
        AdmissionMiddleware, OpenRequestsMiddleware,
    ]
    build = entry.__dict__["build_app"]

    def build_app(args: Any, *rest: Any, **kwargs: Any) -> FastAPI:
        # Named, because vLLM's app takes no middleware once it is built.
        args.middleware = [*args.middleware, *map(_name_of, middleware)]
        app = build(args, *rest, **kwargs)
        app.state.admission = admission
        drain.watch(app)
        theirs = list(app.router.routes)
        app.include_router(routes)
        ours = [route for route in app.router.routes if route not in theirs]
        app.router.routes[:] = sorted(
            [*ours, *theirs], key=lambda route: getattr(route, "path", "") not in BUSIEST
        )
        return app

    with (
        _replaced(entry, "build_app", build_app),
        _replaced(Request, "json", json_of),
        _replaced(BaseMultiModalItemTracker, "mm_processor", one_processor_for_chats()),
    ):
        yield


def _name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
