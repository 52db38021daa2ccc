"""LoRA adapters for the demo checkpoint, tiny and random, but strong enough to be seen."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from configs.demo.tiny_model import HIDDEN

RANK = 4
LAYERS = 2
OUTPUTS = {"q_proj": HIDDEN, "v_proj": HIDDEN // 2, "o_proj": HIDDEN}
"""Values that each adapted layer puts out; all take HIDDEN in."""


def write_adapter(target: Path, seed: int) -> Path:
    """Write an adapter of the language model's attention."""
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        for name, width in OUTPUTS.items():
            prefix = (
                f"base_model.model.model.language_model.layers.{layer}.self_attn.{name}"
            )
            down = torch.randn(RANK, HIDDEN, generator=random) / HIDDEN**0.5
            weights[f"{prefix}.lora_A.weight"] = down
            weights[f"{prefix}.lora_B.weight"] = torch.randn(width, RANK, generator=random)
    target.mkdir(parents=True)
    save_file(weights, target / "adapter_model.safetensors")
    (target / "adapter_config.json").write_text(
        json.dumps({
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK,
            "lora_alpha": 2 * RANK, "lora_dropout": 0.0, "bias": "none",
            "target_modules": list(OUTPUTS), "use_dora": False, "use_rslora": False,
        })
    )
    return target
