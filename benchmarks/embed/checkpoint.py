"""A checkpoint whose vision tower costs beside its language model what a real one's does.

The proportions are those of Qwen2.5-VL-3B: every width is a quarter of what it is there,
and so is the number of layers. Only that no layer of the tower sees the whole image, where
one in eight does: attention shrinks less with the width than all else, and one such layer
would cost a third of what the rest does. So the tower costs a little less here than there.
Weights are random and seeded; what it answers is noise.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.utils import logging

from configs.demo import tiny_model

HIDDEN, HEAD = 512, 128
TEXT = {
    "hidden_size": HIDDEN,
    "intermediate_size": 2752,
    "num_hidden_layers": 9,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24],
    },
}
VISION = {
    "depth": 8,
    "hidden_size": 320,
    "intermediate_size": 855,
    "num_heads": 4,
    "out_hidden_size": HIDDEN,
    "fullatt_block_indexes": [],
}


def save(target: Path) -> None:
    """Write it to ``target``, with the demo's tokenizer and processor."""
    logging.disable_progress_bar()
    tokenizer = tiny_model.build_tokenizer()
    build_model(tiny_model.build_config(tokenizer.get_vocab())).save_pretrained(target)
    processor = tiny_model.build_processor(tokenizer)
    processor.save_pretrained(target)
    processor.image_processor.save_pretrained(target)


def build_model(demo: Qwen2_5_VLConfig) -> Qwen2_5_VLForConditionalGeneration:
    """The model, with all that is not a size taken from the demo's configuration."""
    whole = demo.to_dict()
    del whole["text_config"]["layer_types"]  # one for each layer, and all alike
    whole["text_config"] |= TEXT
    whole["vision_config"] |= VISION
    model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**whole))
    rng = torch.Generator().manual_seed(tiny_model.SEED)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or "ln_q" in name:
                weight.fill_(1.0)
            else:
                weight.normal_(0.0, tiny_model.spread(name, weight), generator=rng)
    return model
