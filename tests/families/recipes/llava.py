"""Recipes of families that put a projector between a CLIP-like tower and a language model."""

from __future__ import annotations

from typing import Any

from transformers import (
    CLIPImageProcessor,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessor,
    Gemma3Processor,
    GotOcr2ImageProcessor,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessor,
    Idefics3Processor,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    InternVLVideoProcessor,
    Lfm2VlConfig,
    Lfm2VlForConditionalGeneration,
    Lfm2VlImageProcessor,
    Lfm2VlProcessor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    LlavaProcessor,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PixtralImageProcessor,
    PixtralProcessor,
)

from tests.families.recipes.parts import (
    HIDDEN,
    VISION_HIDDEN,
    Parts,
    byte_tokenizer,
    ids_of,
    text_config,
)

TOWER = ((r"^vision_tower\.", "vision_tower.vision_model."),)
IMAGE, VIDEO = "<image>", "<video>"


def _tower(kind: str, **more: Any) -> dict[str, Any]:
    """A vision tower of two layers."""
    return {
        "model_type": kind,
        "hidden_size": VISION_HIDDEN,
        "intermediate_size": 2 * VISION_HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 112,
        "patch_size": 14,
        **more,
    }


def llava_1_5() -> Parts:
    tokenizer = byte_tokenizer([IMAGE], {"image": IMAGE})
    ids = ids_of(tokenizer)
    config = LlavaConfig(
        text_config={"model_type": "llama", **text_config(ids)},
        vision_config=_tower("clip_vision_model", projection_dim=VISION_HIDDEN),
        image_token_index=ids[IMAGE],
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessor(
            size={"shortest_edge": 112}, crop_size={"height": 112, "width": 112}
        ),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template,
    )
    return Parts(config, LlavaForConditionalGeneration, processor, TOWER)


PINPOINTS = [[112, 224], [224, 112], [224, 224]]


def llava_next() -> Parts:
    tokenizer = byte_tokenizer([IMAGE], {"image": IMAGE})
    ids = ids_of(tokenizer)
    config = LlavaNextConfig(
        text_config={"model_type": "mistral", **text_config(ids, sliding_window=None)},
        vision_config=_tower("clip_vision_model", projection_dim=VISION_HIDDEN),
        image_token_index=ids[IMAGE],
        image_grid_pinpoints=PINPOINTS,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )
    processor = LlavaNextProcessor(
        image_processor=LlavaNextImageProcessor(
            size={"shortest_edge": 112}, crop_size={"height": 112, "width": 112},
            image_grid_pinpoints=PINPOINTS,
        ),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template,
    )
    return Parts(config, LlavaNextForConditionalGeneration, processor, TOWER)


def llava_onevision() -> Parts:
    tokenizer = byte_tokenizer([IMAGE, VIDEO], {"image": IMAGE, "video": VIDEO})
    ids = ids_of(tokenizer)
    config = LlavaOnevisionConfig(
        text_config={"model_type": "qwen2", **text_config(ids)},
        vision_config=_tower("siglip_vision_model", vision_use_head=False),
        image_token_index=ids[IMAGE],
        video_token_index=ids[VIDEO],
        image_grid_pinpoints=PINPOINTS,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    size = {"height": 112, "width": 112}
    processor = LlavaOnevisionProcessor(
        image_processor=LlavaOnevisionImageProcessor(
            size=size, image_grid_pinpoints=PINPOINTS
        ),
        tokenizer=tokenizer,
        video_processor=LlavaOnevisionVideoProcessor(size=size),
        num_image_tokens=64,
        vision_feature_select_strategy="full",
        chat_template=tokenizer.chat_template,
    )
    return Parts(config, LlavaOnevisionForConditionalGeneration, processor, TOWER)


def gemma3() -> Parts:
    special = ["<start_of_image>", "<end_of_image>", "<image_soft_token>"]
    tokenizer = byte_tokenizer(
        special, {"image": "<start_of_image>"},
        extra_special_tokens={
            "boi_token": special[0], "eoi_token": special[1], "image_token": special[2]
        },
        plain=["\n" * count for count in range(1, 5)],
    )
    ids = ids_of(tokenizer)
    config = Gemma3Config(
        text_config=text_config(
            ids, num_hidden_layers=4, query_pre_attn_scalar=32, sliding_window=64,
            layer_types=["sliding_attention", "full_attention"] * 2,
        ),
        vision_config=_tower("siglip_vision_model", vision_use_head=False),
        mm_tokens_per_image=16,
        boi_token_index=ids[special[0]],
        eoi_token_index=ids[special[1]],
        image_token_index=ids[special[2]],
    )
    processor = Gemma3Processor(
        image_processor=Gemma3ImageProcessor(size={"height": 112, "width": 112}),
        tokenizer=tokenizer,
        image_seq_length=16,
        chat_template=tokenizer.chat_template,
    )
    return Parts(
        config, Gemma3ForConditionalGeneration, processor, TOWER,
        embedding=HIDDEN**-0.5,  # the model multiplies it by the inverse
    )


def internvl() -> Parts:
    special = ["<img>", "</img>", "<IMG_CONTEXT>", VIDEO]
    tokenizer = byte_tokenizer(
        special, {"image": "<IMG_CONTEXT>\n", "video": f"{VIDEO}\n"},
        extra_special_tokens={
            "start_image_token": special[0], "end_image_token": special[1],
            "context_image_token": special[2], "video_token": VIDEO,
        },
    )
    ids = ids_of(tokenizer)
    config = InternVLConfig(
        text_config={"model_type": "qwen2", **text_config(ids)},
        vision_config=_tower(
            "internvl_vision", image_size=[112, 112], patch_size=[14, 14],
            use_absolute_position_embeddings=True,
        ),
        image_token_id=ids[special[2]],
        image_seq_length=16,
        vision_feature_layer=-1,
    )
    size = {"height": 112, "width": 112}
    processor = InternVLProcessor(
        image_processor=GotOcr2ImageProcessor(
            size=size, crop_to_patches=True, min_patches=1, max_patches=4
        ),
        tokenizer=tokenizer,
        video_processor=InternVLVideoProcessor(size=size),
        image_seq_length=16,
        chat_template=tokenizer.chat_template,
    )
    return Parts(config, InternVLForConditionalGeneration, processor)


def idefics3() -> Parts:
    special = [
        "<fake_token_around_image>", IMAGE, "<end_of_utterance>", "<global-img>",
        *(f"<row_{row + 1}_col_{column + 1}>" for row in range(6) for column in range(6)),
    ]
    tokenizer = byte_tokenizer(special, {"image": IMAGE})
    ids = ids_of(tokenizer)
    config = Idefics3Config(
        text_config={"model_type": "llama", **text_config(ids)},
        vision_config=_tower("idefics3_vision", patch_size=14),
        image_token_id=ids[IMAGE],
        pad_token_id=ids.ending["pad_token_id"],
        scale_factor=2,
    )
    processor = Idefics3Processor(
        image_processor=Idefics3ImageProcessor(
            size={"longest_edge": 224}, max_image_size={"longest_edge": 112}
        ),
        tokenizer=tokenizer,
        image_seq_len=16,
        chat_template=tokenizer.chat_template,
    )
    return Parts(config, Idefics3ForConditionalGeneration, processor)


def mistral3() -> Parts:
    special = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]
    tokenizer = byte_tokenizer(special, {"image": "[IMG]"})
    ids = ids_of(tokenizer)
    config = Mistral3Config(
        text_config={"model_type": "mistral", **text_config(ids, sliding_window=None)},
        vision_config=_tower("pixtral", image_size=224, head_dim=32),
        image_token_index=ids["[IMG]"],
        spatial_merge_size=2,
        vision_feature_layer=-1,
    )
    processor = PixtralProcessor(
        image_processor=PixtralImageProcessor(
            size={"longest_edge": 224}, patch_size={"height": 14, "width": 14}
        ),
        tokenizer=tokenizer,
        patch_size=14,
        spatial_merge_size=2,
        chat_template=tokenizer.chat_template,
    )
    return Parts(config, Mistral3ForConditionalGeneration, processor)


def lfm2_vl() -> Parts:
    special = [IMAGE, "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"]
    tokenizer = byte_tokenizer(
        special, {"image": IMAGE},
        extra_special_tokens={
            "image_token": IMAGE, "image_start_token": special[1],
            "image_end_token": special[2], "image_thumbnail": special[3],
        },
    )
    ids = ids_of(tokenizer)
    config = Lfm2VlConfig(
        text_config={
            "model_type": "lfm2",
            **text_config(
                ids, num_hidden_layers=4, layer_types=["conv", "full_attention"] * 2,
                block_ff_dim=2 * HIDDEN, block_dim=HIDDEN, conv_dim=HIDDEN,
                block_auto_adjust_ff_dim=False,
            ),
        },
        vision_config={
            "model_type": "siglip2_vision_model",
            "hidden_size": VISION_HIDDEN, "intermediate_size": 2 * VISION_HIDDEN,
            "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 16,
            "num_patches": 256, "vision_use_head": False,
        },
        image_token_id=ids[IMAGE],
        projector_hidden_size=HIDDEN,
    )
    processor = Lfm2VlProcessor(
        image_processor=Lfm2VlImageProcessor(
            do_image_splitting=False, max_num_patches=256, min_image_tokens=16,
            max_image_tokens=64,
        ),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    )
    renamed = [(r"^model\.vision_tower\.", "model.vision_tower.vision_model.")]
    return Parts(config, Lfm2VlForConditionalGeneration, processor, renamed)
