"""How long a step of a mock engine takes.

    seconds = STEP
            + PREFILL_TOKEN  * prompt tokens computed in this step
            + ENCODER_TOKEN  * embedding tokens of images encoded in this step
            + DECODE_REQUEST * requests that get their next token
            + CONTEXT_TOKEN  * tokens in the KV cache that those requests look back on

The constants are estimates for a vision-language model of 7 billion parameters in
bfloat16 (Qwen2.5-VL-7B: 28 layers, 4 KV heads of 128) on a data-centre GPU that computes
about 200 TFLOP/s and reads about 2 TB/s in practice. They are arithmetic, not
measurements; the comments show it. What a replay compares are routers in front of the
same engines, and for that the proportions matter: a prompt token costs far more than a
token looked back on, and an image costs its encoder on top.
"""

from __future__ import annotations

STEP_SECONDS = 0.008
"""Reading 15 GB of weights once, and starting the kernels."""

PREFILL_TOKEN_SECONDS = 80e-6
"""2 * 7.6e9 operations at 200 TFLOP/s."""

ENCODER_TOKEN_SECONDS = 60e-6
"""Four patches, each 2 * 0.67e9 operations, and attention among the patches of an image
as much again."""

DECODE_REQUEST_SECONDS = 80e-6
"""One token through the layers, as in prefill."""

CONTEXT_TOKEN_SECONDS = 29e-9
"""57,344 bytes of keys and values at 2 TB/s."""


def step_seconds(
    prefill_tokens: int, encoder_tokens: int, decode_requests: int, context_tokens: int
) -> float:
    """Return how long a step takes that computes this, in seconds."""
    return (
        STEP_SECONDS
        + PREFILL_TOKEN_SECONDS * prefill_tokens
        + ENCODER_TOKEN_SECONDS * encoder_tokens
        + DECODE_REQUEST_SECONDS * decode_requests
        + CONTEXT_TOKEN_SECONDS * context_tokens
    )


def decode_seconds(steps: int, decode_requests: int, context_tokens: int) -> float:
    """Return how long ``steps`` steps take that do nothing but decode.

    ``context_tokens`` is that of the first step; each step adds a token per request.
    """
    added = decode_requests * steps * (steps - 1) // 2
    return steps * step_seconds(0, 0, decode_requests, 0) + CONTEXT_TOKEN_SECONDS * (
        steps * context_tokens + added
    )
