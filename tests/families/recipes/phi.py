"""Recipe of a family whose configuration and processor are code in the checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import CLIPVisionConfig, CLIPVisionModel, Phi3ForCausalLM

from tests.families.recipes.configuration_phi3_v import Phi3VConfig
from tests.families.recipes.parts import (
    BEGIN,
    END,
    HIDDEN,
    Parts,
    byte_tokenizer,
    ids_of,
    text_config,
)
from tests.families.recipes.processing_phi3_v import Phi3VImageProcessor, Phi3VProcessor

VOCABULARY = 32064
"""vLLM marks the places of images by a token of the published vocabulary."""
WIDTH = 1024
"""vLLM takes the tower's sizes, but for its depth, from the published model."""

# Strings only: vLLM writes <|image_1|> and so on into the text.
TEMPLATE = (
    "{%- for message in messages -%}"
    f"{{{{- '{BEGIN}' ~ message.role ~ '\\n' ~ message.content ~ '{END}' -}}}}"
    "{%- endfor -%}"
    f"{{%- if add_generation_prompt -%}}{{{{- '{BEGIN}assistant\\n' -}}}}{{%- endif -%}}"
)


class Embedding(nn.Module):
    """What turns pictures into tokens; never run here, only saved."""

    def __init__(self) -> None:
        super().__init__()
        self.glb_GN = nn.Parameter(torch.empty(1, 1, 4 * WIDTH))
        self.sub_GN = nn.Parameter(torch.empty(1, 1, 1, 4 * WIDTH))
        self.img_processor = CLIPVisionModel(
            CLIPVisionConfig(
                hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=1,
                num_attention_heads=16, image_size=336, patch_size=14, projection_dim=768,
            )
        )
        self.img_projection = nn.Sequential(
            nn.Linear(4 * WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN)
        )


class Phi3VForCausalLM(Phi3ForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.vision = Embedding()


def phi3_v() -> Parts:
    tokenizer = byte_tokenizer([], {})
    tokenizer.chat_template = TEMPLATE
    ids = ids_of(tokenizer)
    sizes = {**text_config(ids), "vocab_size": VOCABULARY}
    Phi3VConfig.register_for_auto_class()
    config = Phi3VConfig(
        **sizes,
        img_processor={
            "layer_idx": 0, "num_img_tokens": 144, "image_dim_out": WIDTH,
            "type_feature": "patch", "name": "clip_vision_model",
        },
        embd_layer={
            "use_hd_transform": True, "with_learnable_separator": True,
            "hd_transform_order": "sub_glb", "embedding_cls": "image",
        },
    )
    Phi3VImageProcessor.register_for_auto_class("AutoImageProcessor")
    Phi3VProcessor.register_for_auto_class("AutoProcessor")
    processor = Phi3VProcessor(Phi3VImageProcessor(), tokenizer, chat_template=TEMPLATE)
    embedding = "model.vision_embed_tokens."
    return Parts(
        config, Phi3VForCausalLM, processor,
        renamed=[
            (r"^model\.vision\.img_processor\.", f"{embedding}img_processor.vision_model."),
            (r"^model\.vision\.", embedding),
        ],
    )
