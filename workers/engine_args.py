"""From the command line to a vLLM engine that a frontend can route to.

vLLM names relied on: AsyncEngineArgs (add_cli_args, from_cli_args, create_engine_config),
KVEventsConfig, ECTransferConfig, MultiModalBudget, FlexibleArgumentParser;
SpeculativeConfig.use_eagle_block_drop; VllmConfig.is_mm_encoder_only;
ModelConfig.logits_processors, v1.sample.logits_processor.LOGITSPROCS_GROUP.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

import msgspec
from vllm.config import VllmConfig
from vllm.config.ec_transfer import ECTransferConfig
from vllm.config.kv_events import KVEventsConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.encoder_budget import MultiModalBudget
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP

from configs.flags import BadSetting, add_flags, read_settings, sentence_of
from configs.logs import use_json_config
from configs.schema import WorkerConfig
from transfer.block_hash_root import root_hash_of
from transfer.engine_facts import shared_facts
from transfer.messages import WorkerFacts

WORKER_CLASSES = {
    True: "workers.arena_cpu_worker.ArenaCPUWorker",
    False: "workers.arena_gpu_worker.ArenaGPUWorker",
}


def parse(arguments: Sequence[str]) -> tuple[WorkerConfig, argparse.Namespace]:
    """Split a command line into our settings and vLLM's engine flags.

    Raises:
        BadSetting: a value makes no sense; the text is one sentence.
    """
    parser = FlexibleArgumentParser(
        prog="python -m workers",
        description="One vLLM engine behind Foveal frontends. Takes every vLLM engine flag.",
    )
    parser.add_argument("--config", help="YAML file with flags of this command.")
    add_flags(parser, WorkerConfig)
    AsyncEngineArgs.add_cli_args(parser)
    args = parser.parse_args(list(arguments))
    settings = read_settings(WorkerConfig, args, os.environ)
    if settings.discovery is not None and settings.port is None:
        raise BadSetting(
            "--discovery is for frontends on other hosts: give --host and --port, too, for "
            "them to reach this worker (--port 0 takes any that is free)"
        )
    if settings.log_format == "json":
        use_json_config(args, os.environ)
    return settings, args


def engine_config(
    args: argparse.Namespace, sockets: Path, embeddings: ECTransferConfig | None = None
) -> VllmConfig:
    """Build the engine's configuration, with what must not vary set here.

    ``sockets`` is a private directory; the engine publishes its KV events there.
    ``embeddings`` connects the engine to the encoder outputs that its host shares.

    Raises:
        BadSetting: a flag contradicts what a routed worker needs.
    """
    engine_args = AsyncEngineArgs.from_cli_args(args)
    if engine_args.data_parallel_size and engine_args.data_parallel_size > 1:
        raise BadSetting(
            "--data-parallel-size above 1 is not supported: start one worker per rank"
        )
    if engine_args.enable_prefix_caching is False:
        raise BadSetting(
            "--no-enable-prefix-caching leaves nothing to route by: leave prefix caching on "
            "(frontends have --router-mode round-robin)"
        )
    if args.worker_cls == "auto":
        engine_args.worker_cls = WORKER_CLASSES[current_platform.is_cpu()]
    # Tensors come by reference from the frontends; nothing is processed here.
    engine_args.mm_processor_cache_gb = 0
    if engine_args.prefix_caching_hash_algo == "sha256":
        # vLLM's default hashes pickles, which differ between Python versions.
        engine_args.prefix_caching_hash_algo = "sha256_cbor"
    # ipc: vLLM's publisher binds ipc endpoints and connects to most others.
    engine_args.kv_events_config = KVEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", endpoint=f"ipc://{sockets}/kv-events"
    )
    if embeddings is not None:
        if engine_args.ec_transfer_config is not None:
            raise BadSetting(
                "--ec-transfer-config and --multimodal-embedding-cache-capacity-gb each set "
                "the engine's encoder cache connector: give one of them"
            )
        engine_args.ec_transfer_config = embeddings
    try:
        return engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    except (ValueError, OSError) as error:
        raise BadSetting(sentence_of(error)) from error


def facts_of(
    config: VllmConfig, seed_fingerprint: str, *, engine: str = "vllm"
) -> WorkerFacts:
    """State what a frontend must agree on, once the engine is up."""
    cache, scheduler = config.cache_config, config.scheduler_config
    facts = {
        **shared_facts(config),
        "engine": engine,
        "role": "encode" if config.is_mm_encoder_only else "generate",
        "block_size": cache.block_size,
        "hash_algorithm": cache.prefix_caching_hash_algo,
        "root_hash": root_hash_of(cache.prefix_caching_hash_algo),
        "max_model_len": config.model_config.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "encoder_cache_tokens": _encoder_cache_tokens(config),
        "num_kv_blocks": cache.num_gpu_blocks or 0,
        "identity_seed_fingerprint": seed_fingerprint,
        "drops_last_matched_block": bool(
            config.speculative_config and config.speculative_config.use_eagle_block_drop()
        ),
        "own_logits_processors": bool(
            # With speculative decoding vLLM loads no plugins, and refuses the flag.
            not config.speculative_config
            and (
                config.model_config.logits_processors
                or entry_points(group=LOGITSPROCS_GROUP)
            )
        ),
    }
    return msgspec.convert(facts, WorkerFacts)


def _encoder_cache_tokens(config: VllmConfig) -> int:
    if not config.model_config.supports_multimodal_inputs:
        return 0
    budget = MultiModalBudget(config, MULTIMODAL_REGISTRY)
    budget.reset_cache()
    return budget.encoder_cache_size
