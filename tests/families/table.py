"""The families: what each is called, can be shown, and does not do here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """One family of models."""

    name: str
    title: str
    recipe: str
    """Module and function below ``tests.families.recipes``."""
    modalities: tuple[str, ...] = ("image",)
    kind: str = "vision-language"
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that its engines need besides those of all."""
    own_code: bool = False
    """Whether its processor is code in the checkpoint, which one has to trust."""
    no_reuse: str = ""
    """Why the engine reuses no part of a prompt; empty where it does."""
    no_engine: str = ""
    """Why vLLM's CPU build cannot run it: a part of what it then says."""


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("qwen2-vl", "Qwen2-VL", "qwen.qwen2_vl", ("image", "video")),
        Family("qwen2.5-vl", "Qwen2.5-VL", "qwen.qwen2_5_vl", ("image", "video")),
        Family("qwen3-vl", "Qwen3-VL", "qwen.qwen3_vl", ("image", "video")),
        Family("internvl", "InternVL", "llava.internvl", ("image", "video")),
        Family("gemma-3", "Gemma 3", "llava.gemma3", kind="sliding window"),
        Family("llava-1.5", "LLaVA-1.5", "llava.llava_1_5"),
        Family("llava-next", "LLaVA-NeXT", "llava.llava_next"),
        Family(
            "llava-onevision", "LLaVA-OneVision", "llava.llava_onevision", ("image", "video")
        ),
        Family("idefics3", "Idefics3", "llava.idefics3"),
        Family("mistral-3", "Mistral 3 (Pixtral tower)", "llava.mistral3"),
        Family("phi-3.5-vision", "Phi-3.5-vision", "phi.phi3_v", own_code=True),
        Family("qwen2-audio", "Qwen2-Audio", "qwen.qwen2_audio", ("audio",)),
        Family(
            "qwen2.5-omni", "Qwen2.5-Omni (thinker)", "omni.qwen2_5_omni",
            ("image", "video", "audio"),
        ),
        Family(
            "qwen3-vl-moe", "Qwen3-VL-MoE", "qwen.qwen3_vl_moe", ("image", "video"),
            kind="mixture of experts",
        ),
        Family("lfm2-vl", "LFM2-VL", "llava.lfm2_vl", kind="hybrid with convolutions"),
    )
}
