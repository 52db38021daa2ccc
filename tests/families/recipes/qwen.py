"""Recipes of the Qwen families."""

from __future__ import annotations

from typing import Any

from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
    WhisperFeatureExtractor,
)

from tests.families.recipes.parts import (
    HIDDEN,
    VISION_HIDDEN,
    Ids,
    Parts,
    byte_tokenizer,
    ids_of,
    text_config,
)

VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
SHOWN = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
}
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}
MAX_PIXELS = 448 * 448


def _vision_ids(ids: Ids) -> dict[str, int]:
    return {
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
    }


def _tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer(VISION, SHOWN, extra_special_tokens={
        "image_token": "<|image_pad|>", "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>",
    })


def size_of(patch: int) -> dict[str, int]:
    return {"shortest_edge": (2 * patch) ** 2 * 4, "longest_edge": MAX_PIXELS}


def _processor(kind: Any, tokenizer: PreTrainedTokenizerFast, videos: Any) -> Any:
    return kind(
        image_processor=Qwen2VLImageProcessor(size=size_of(14)),
        tokenizer=tokenizer,
        video_processor=videos,
        chat_template=tokenizer.chat_template,
    )


def qwen2_vl() -> Parts:
    tokenizer = _tokenizer()
    ids = ids_of(tokenizer)
    config = Qwen2VLConfig(
        text_config=text_config(ids, rope_parameters=MROPE),
        vision_config={
            "depth": 2, "embed_dim": VISION_HIDDEN, "hidden_size": HIDDEN, "num_heads": 2,
        },
        **_vision_ids(ids),
    )
    videos = Qwen2VLVideoProcessor(size=size_of(14))
    processor = _processor(Qwen2VLProcessor, tokenizer, videos)
    return Parts(config, Qwen2VLForConditionalGeneration, processor)


def qwen2_5_vl() -> Parts:
    tokenizer = _tokenizer()
    ids = ids_of(tokenizer)
    config = Qwen2_5_VLConfig(
        text_config=text_config(ids, rope_parameters=MROPE),
        vision_config={
            "depth": 2, "hidden_size": VISION_HIDDEN, "intermediate_size": 2 * VISION_HIDDEN,
            "num_heads": 2, "out_hidden_size": HIDDEN, "fullatt_block_indexes": [1],
        },
        **_vision_ids(ids),
    )
    videos = Qwen2VLVideoProcessor(size=size_of(14))
    processor = _processor(Qwen2_5_VLProcessor, tokenizer, videos)
    return Parts(config, Qwen2_5_VLForConditionalGeneration, processor)


def _qwen3_vision() -> dict[str, Any]:
    return {
        "depth": 2, "hidden_size": VISION_HIDDEN, "intermediate_size": 2 * VISION_HIDDEN,
        "num_heads": 2, "out_hidden_size": HIDDEN, "patch_size": 16,
        "deepstack_visual_indexes": [0], "num_position_embeddings": 1024,
    }


def _qwen3_processor(tokenizer: PreTrainedTokenizerFast) -> Any:
    edges = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=size_of(16), **edges),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(
            size={"shortest_edge": 4096, "longest_edge": 8 * MAX_PIXELS}, **edges
        ),
        chat_template=tokenizer.chat_template,
    )


def qwen3_vl() -> Parts:
    tokenizer = _tokenizer()
    ids = ids_of(tokenizer)
    config = Qwen3VLConfig(
        text_config=text_config(ids, rope_parameters={**MROPE, "mrope_interleaved": True}),
        vision_config=_qwen3_vision(),
        **_vision_ids(ids),
    )
    return Parts(config, Qwen3VLForConditionalGeneration, _qwen3_processor(tokenizer))


def qwen3_vl_moe() -> Parts:
    tokenizer = _tokenizer()
    ids = ids_of(tokenizer)
    config = Qwen3VLMoeConfig(
        text_config=text_config(
            ids, rope_parameters={**MROPE, "mrope_interleaved": True},
            num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
            decoder_sparse_step=1, norm_topk_prob=True,
        ),
        vision_config=_qwen3_vision(),
        **_vision_ids(ids),
    )
    return Parts(
        config, Qwen3VLMoeForConditionalGeneration, _qwen3_processor(tokenizer),
        transposed=r"\.experts\.",
    )


def qwen2_audio() -> Parts:
    special = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
    tokenizer = byte_tokenizer(special, {"audio": "<|audio_bos|><|AUDIO|><|audio_eos|>"})
    ids = ids_of(tokenizer)
    config = Qwen2AudioConfig(
        text_config={"model_type": "qwen2", **text_config(ids)},
        audio_config={
            "model_type": "qwen2_audio_encoder", "d_model": VISION_HIDDEN,
            "encoder_layers": 2, "encoder_attention_heads": 2,
            "encoder_ffn_dim": 2 * VISION_HIDDEN, "num_mel_bins": 80,
            "max_source_positions": 1500,
        },
        audio_token_index=ids["<|AUDIO|>"],
    )
    processor = Qwen2AudioProcessor(
        feature_extractor=WhisperFeatureExtractor(feature_size=80),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    )
    renamed = [(r"^language_model\.model\.model\.", "language_model.model.")]
    return Parts(config, Qwen2AudioForConditionalGeneration, processor, renamed)
