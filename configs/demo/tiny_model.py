"""The demo model: a Qwen2.5-VL with every part of a real one and no knowledge.

It writes printable nonsense that depends on the whole prompt, pictures included. It does
not end an answer by itself: `max_tokens`, or a grammar that is complete, does.
"""

import math
from pathlib import Path

import torch
from tokenizers import AddedToken, pre_tokenizers
from transformers import (
    GenerationConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)
from transformers.utils import logging

SEED = 1
HIDDEN = 128
VISION_HIDDEN = 64
VOCAB_SIZE = 288
MAX_PIXELS = 1003520
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<think>", "</think>")

# One residual channel is the same at every position, so its lm_head column acts as the
# bias that Qwen's lm_head does not have. The column is spent on which bytes are likely.
CONSTANT = 0
CONSTANT_LEVEL = 4.0
LIKELY = {"letter": 3.0, "closing": 3.0, "space": 2.0, "digit": -1.0, "mark": -2.5}
NEVER = -40.0


def save(target: Path) -> None:
    logging.disable_progress_bar()
    tokenizer = build_tokenizer()
    build_model(tokenizer).save_pretrained(target)
    processor = build_processor(tokenizer)
    processor.save_pretrained(target)
    # Some readers know only the older file name.
    processor.image_processor.save_pretrained(target)


def build_tokenizer() -> Qwen2Tokenizer:
    """One token per byte, then the tokens that Qwen adds."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=[],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=32768,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE.read_text(),
    )
    tokenizer.add_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in MARKUP_TOKENS])
    return tokenizer


def build_config(token_ids: dict[str, int]) -> Qwen2_5_VLConfig:
    return Qwen2_5_VLConfig(
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        dtype="float32",
        text_config={
            "vocab_size": VOCAB_SIZE,
            "hidden_size": HIDDEN,
            "intermediate_size": 2 * HIDDEN,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000000.0,
                "mrope_section": [4, 6, 6],
            },
            **ending(token_ids),
        },
        vision_config={
            "depth": 2,
            "hidden_size": VISION_HIDDEN,
            "intermediate_size": 2 * VISION_HIDDEN,
            "num_heads": 2,
            "out_hidden_size": HIDDEN,
            "fullatt_block_indexes": [1],
        },
        vision_start_token_id=token_ids["<|vision_start|>"],
        vision_end_token_id=token_ids["<|vision_end|>"],
        image_token_id=token_ids["<|image_pad|>"],
        video_token_id=token_ids["<|video_pad|>"],
    )


def ending(token_ids: dict[str, int]) -> dict[str, int]:
    return {
        "bos_token_id": token_ids["<|endoftext|>"],
        "eos_token_id": token_ids["<|im_end|>"],
        "pad_token_id": token_ids["<|endoftext|>"],
    }


def build_processor(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLProcessor:
    size = {"shortest_edge": 56 * 56, "longest_edge": MAX_PIXELS}
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=size),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(),
        chat_template=tokenizer.chat_template,
    )


def build_model(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    token_ids = tokenizer.get_vocab()
    model = Qwen2_5_VLForConditionalGeneration(build_config(token_ids))
    rng = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or "ln_q" in name:
                weight.fill_(1.0)
            else:
                weight.normal_(0.0, spread(name, weight), generator=rng)
        hold_constant_channel(model)
        model.lm_head.weight[:, CONSTANT] = byte_preferences(tokenizer)
    model.generation_config = GenerationConfig(**ending(token_ids))
    return model


def spread(name: str, weight: torch.Tensor) -> float:
    """Standard deviation that keeps signals of unit size, and attention choosy.

    Attention that averages over everything would forget pictures; biases in the vision
    tower keep a dark picture from being a scaled copy of a bright one.
    """
    if name.endswith("embed_tokens.weight"):
        return 1.0
    if name.endswith(".bias"):
        return 0.5 if ".visual." in name else 0.1
    gain = 1.0
    if ".visual." in name:
        gain = 2.0 if name.endswith("merger.mlp.2.weight") else 1.0
    elif name.endswith(("q_proj.weight", "k_proj.weight")):
        gain = 3.0
    elif name.endswith(("o_proj.weight", "lm_head.weight")):
        gain = 4.0
    elif name.endswith("down_proj.weight"):
        gain = 2.0
    return gain / math.sqrt(weight[0].numel())


def hold_constant_channel(model: Qwen2_5_VLForConditionalGeneration) -> None:
    """Set one channel everywhere; no layer reads it or writes to it, but lm_head does."""
    text = model.model.language_model
    text.embed_tokens.weight[:, CONSTANT] = CONSTANT_LEVEL
    merger_out = model.model.visual.merger.mlp[2]
    merger_out.weight[CONSTANT] = 0.0
    merger_out.bias[CONSTANT] = CONSTANT_LEVEL
    for layer in text.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for reader in (attention.q_proj, attention.k_proj, attention.v_proj):
            reader.weight[:, CONSTANT] = 0.0
        for reader in (mlp.gate_proj, mlp.up_proj):
            reader.weight[:, CONSTANT] = 0.0
        for writer in (attention.o_proj, mlp.down_proj):
            writer.weight[CONSTANT] = 0.0


def byte_preferences(tokenizer: Qwen2Tokenizer) -> torch.Tensor:
    preferences = torch.full((VOCAB_SIZE,), NEVER)
    for char in map(chr, range(0x20, 0x7F)):
        [token_id] = tokenizer.encode(char, add_special_tokens=False)
        preferences[token_id] = LIKELY[kind_of(char)]
    return preferences


def kind_of(char: str) -> str:
    if char.islower():
        return "letter"
    if char == " ":
        return "space"
    if char in '"}]':  # or else JSON under a grammar would seldom end
        return "closing"
    return "digit" if char.isalnum() else "mark"
