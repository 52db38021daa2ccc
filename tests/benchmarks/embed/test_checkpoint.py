"""What is measured with has the proportions of a published model."""

from __future__ import annotations

from benchmarks.embed.checkpoint import HEAD, TEXT, VISION

PATCHES = 4
"""Of the tower, for a token of the language model."""


def tower(layers: int, width: int, inner: int) -> int:
    """Multiplications for the patches of one token, apart from attention's own."""
    return PATCHES * layers * (4 * width**2 + 3 * width * inner)


def language_model(layers: int, width: int, inner: int, keys: int) -> int:
    return layers * (2 * width**2 + 2 * width * keys + 3 * width * inner)


def test_the_tower_costs_beside_the_language_model_what_it_does_in_qwen2_5_vl_3b():
    published = tower(32, 1280, 3420) / language_model(36, 2048, 11008, 2 * 128)
    here = tower(VISION["depth"], VISION["hidden_size"], VISION["intermediate_size"]) / (
        language_model(
            TEXT["num_hidden_layers"], TEXT["hidden_size"], TEXT["intermediate_size"],
            TEXT["num_key_value_heads"] * HEAD,
        )
    )
    assert 0.8 * published < here < 1.15 * published
