"""One log line for each engine request: where it went and why that is cheap there.

In JSON each value is a field of its own. ``request_id`` is what the header
``x-foveal-request-id`` says, and what workers and vLLM call the request.
"""

from __future__ import annotations

import logging
from dataclasses import asdict

from frontend.receipt import Routed

logger = logging.getLogger(__name__)


def log_routed(routed: Routed) -> None:
    """Say where ``routed`` went."""
    if not logger.isEnabledFor(logging.INFO):
        return
    request_id = routed.plain_id
    logger.info(
        "request %s to %s: %d of %d blocks there, tensors %s",
        request_id, routed.worker, routed.overlap_blocks, routed.prompt_blocks,
        routed.transfer,
        extra={**asdict(routed), "request_id": request_id},
    )
