"""Recipe of a family that sees and hears: the thinker of Qwen2.5-Omni."""

from __future__ import annotations

from transformers import (
    Qwen2_5OmniConfig,
    Qwen2_5OmniProcessor,
    Qwen2_5OmniThinkerConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    WhisperFeatureExtractor,
)

from tests.families.recipes.parts import (
    HIDDEN,
    VISION_HIDDEN,
    Parts,
    byte_tokenizer,
    ids_of,
    text_config,
)
from tests.families.recipes.qwen import MROPE, SHOWN, VISION, size_of

SOUND = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")


def qwen2_5_omni() -> Parts:
    tokenizer = byte_tokenizer(
        (*VISION, *SOUND), {**SHOWN, "audio": "<|audio_bos|><|AUDIO|><|audio_eos|>"},
        extra_special_tokens={
            "image_token": "<|image_pad|>", "video_token": "<|video_pad|>",
            "vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>",
            "audio_token": SOUND[0], "audio_bos_token": SOUND[1], "audio_eos_token": SOUND[2],
        },
    )
    ids = ids_of(tokenizer)
    thinker = Qwen2_5OmniThinkerConfig(
        text_config=text_config(ids, rope_parameters=MROPE, sliding_window=None),
        vision_config={
            "depth": 2, "hidden_size": VISION_HIDDEN, "intermediate_size": 2 * VISION_HIDDEN,
            "num_heads": 2, "out_hidden_size": HIDDEN, "fullatt_block_indexes": [1],
        },
        audio_config={
            "d_model": VISION_HIDDEN, "encoder_layers": 2, "encoder_attention_heads": 2,
            "encoder_ffn_dim": 2 * VISION_HIDDEN, "num_mel_bins": 80, "output_dim": HIDDEN,
        },
        image_token_index=ids["<|image_pad|>"],
        video_token_index=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        audio_token_index=ids[SOUND[0]],
        audio_start_token_id=ids[SOUND[1]],
        audio_end_token_id=ids[SOUND[2]],
    )
    # Only the thinker answers in text; the rest has its configuration here, and no weights.
    whole = Qwen2_5OmniConfig(
        thinker_config=thinker.to_dict(), enable_audio_output=False,
        architectures=["Qwen2_5OmniForConditionalGeneration"],
    )
    processor = Qwen2_5OmniProcessor(
        image_processor=Qwen2VLImageProcessor(size=size_of(14)),
        video_processor=Qwen2VLVideoProcessor(size=size_of(14)),
        feature_extractor=WhisperFeatureExtractor(feature_size=80),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    )
    return Parts(
        thinker, Qwen2_5OmniThinkerForConditionalGeneration, processor,
        renamed=[("^", "thinker.")],
        files={"config.json": whole.to_json_string(use_diff=False)},
    )
