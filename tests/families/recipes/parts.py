"""The pieces of every generated checkpoint: tokenizer, chat template, random weights."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SEED = 1
HIDDEN = 128
VISION_HIDDEN = 64
CONTEXT = 8192

PAD, BEGIN, END = "<|pad|>", "<|turn|>", "<|end|>"
"""Special tokens that every family has; END ends an answer."""

TEMPLATE = """\
{{%- macro render(content) -%}}
{{%- if content is string -%}}{{{{- content -}}}}{{%- else -%}}
{{%- for part in content -%}}{placeholders}\
{{%- if 'text' in part -%}}{{{{- part.text -}}}}{{%- endif -%}}
{{%- endfor -%}}{{%- endif -%}}
{{%- endmacro -%}}
{{%- for message in messages -%}}
{{{{- '{begin}' ~ message.role ~ '\\n' -}}}}
{{{{- render(message.content) -}}}}{{{{- '{end}' -}}}}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}{{{{- '{begin}assistant\\n' -}}}}{{%- endif -%}}
"""


def chat_template(shown: Mapping[str, str]) -> str:
    """A template that writes ``shown[modality]`` where a message has such media."""
    placeholders = "".join(
        f"{{%- if part.type in ('{modality}', '{modality}_url') -%}}"
        f"{{{{- {text!r} -}}}}{{%- endif -%}}"
        for modality, text in shown.items()
    )
    return TEMPLATE.format(placeholders=placeholders, begin=BEGIN, end=END)


def byte_tokenizer(
    special: Sequence[str],
    shown: Mapping[str, str],
    plain: Sequence[str] = (),
    **named: Any,
) -> PreTrainedTokenizerFast:
    """One token per byte, and the special and plain ones.

    ``named`` gives some of them names.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([
        AddedToken(token, special=True, normalized=False)
        for token in dict.fromkeys((PAD, BEGIN, END, *special))
    ])
    inner.add_tokens([AddedToken(token, normalized=False) for token in plain])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=PAD,
        bos_token=BEGIN,
        eos_token=END,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=chat_template(shown),
        **named,
    )


@dataclass(frozen=True)
class Ids:
    """Token ids by their text."""

    vocab: dict[str, int]

    def __getitem__(self, token: str) -> int:
        return self.vocab[token]

    @property
    def size(self) -> int:
        """A vocabulary size with room for all, a multiple of 64."""
        return -(-(max(self.vocab.values()) + 1) // 64) * 64

    @property
    def ending(self) -> dict[str, int]:
        return {
            "bos_token_id": self[BEGIN], "eos_token_id": self[END], "pad_token_id": self[PAD]
        }


def ids_of(tokenizer: PreTrainedTokenizerFast) -> Ids:
    return Ids(dict(tokenizer.get_vocab()))


def text_config(ids: Ids, **more: Any) -> dict[str, Any]:
    """A language model of two layers, as most configurations name its sizes."""
    return {
        "vocab_size": ids.size,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HIDDEN // 4,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
        **ids.ending,
        **more,
    }


@dataclass(frozen=True)
class Parts:
    """What a recipe makes."""

    config: Any
    model_class: Any
    processor: Any
    renamed: Sequence[tuple[str, str]] = ()
    """Pattern and replacement for names of weights, where transformers saves them under
    other names than published checkpoints have."""
    transposed: str = ""
    """Pattern of names of weights that published checkpoints have the other way round."""
    embedding: float = 1.0
    """Spread of the token embedding; where it is the output layer too, less will do."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Further files of the checkpoint, by name."""


def random_model(parts: Parts) -> Any:
    """The model with seeded weights whose signals keep about unit size."""
    model = parts.model_class(parts.config)
    rng = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not weight.is_floating_point():
                continue
            if weight.dim() < 2 and ("norm" in name or "ln" in name or "scale" in name):
                weight.fill_(0.0 if name.endswith(".bias") else 1.0)
            else:
                spread = _spread(name, weight)
                if name.endswith("embed_tokens.weight"):
                    spread = parts.embedding
                weight.normal_(0.0, spread, generator=rng)
    return model


def save(parts: Parts, target: Path) -> None:
    """Write the checkpoint: weights, configuration, tokenizer and processor."""
    model = random_model(parts)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(target)
    parts.processor.save_pretrained(target)
    if parts.renamed or parts.transposed:
        file = target / "model.safetensors"
        weights = {}
        for name, weight in load_file(file).items():
            if parts.transposed and re.search(parts.transposed, name):
                weight = weight.transpose(-1, -2).contiguous()
            weights[_renamed(name, parts.renamed)] = weight
        save_file(weights, file, {"format": "pt"})
    for name, text in parts.files.items():
        (target / name).write_text(text)


def _renamed(name: str, patterns: Sequence[tuple[str, str]]) -> str:
    for pattern, replacement in patterns:
        name = re.sub(pattern, replacement, name)
    return name


def _spread(name: str, weight: torch.Tensor) -> float:
    """Standard deviation; attention is choosy, or else it would average pictures away."""
    if "embed" in name and "patch" not in name and "proj" not in name:
        return 1.0
    if weight.dim() < 2:
        return 0.3
    gain = 1.0
    choosy = ("q_proj.weight", "k_proj.weight")
    if name.endswith((*choosy, "o_proj.weight", "out_proj.weight", "lm_head.weight")):
        gain = 3.0
    elif name.endswith("down_proj.weight"):
        gain = 2.0
    return gain / math.sqrt(max(1, weight[0].numel()))
