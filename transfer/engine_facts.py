"""What a frontend and a worker must agree on, read from vLLM's configuration.

vLLM names relied on: VllmConfig, ModelConfig, MultiModalConfig, LoRAConfig.
"""

from __future__ import annotations

import json

import vllm
from vllm.config import VllmConfig

from transfer.messages import PROTOCOL_VERSION


def shared_facts(config: VllmConfig) -> dict[str, str | int | bool]:
    """Those fields of ``WorkerFacts`` that both sides know from their own settings."""
    model, lora = config.model_config, config.lora_config
    multimodal = model.multimodal_config
    return {
        "protocol": PROTOCOL_VERSION,
        "vllm_version": vllm.__version__,
        "model": model.model,
        "revision": model.revision or "",
        "dtype": str(model.dtype).removeprefix("torch."),
        "mm_device_do_normalize": bool(multimodal and multimodal.mm_device_do_normalize),
        "mm_processor_kwargs": json.dumps(
            (multimodal and multimodal.mm_processor_kwargs) or {}, sort_keys=True
        ),
        "reasoning_parser": config.structured_outputs_config.reasoning_parser,
        "lora": "" if lora is None else json.dumps(
            {
                "max_loras": lora.max_loras,
                "max_lora_rank": lora.max_lora_rank,
                "tower_connector": lora.enable_tower_connector_lora,
            },
            sort_keys=True,
        ),
    }
