"""LoRA adapters under numbers that hold for a whole fleet.

vLLM numbers adapters as a server comes to know them. Workers serve several frontends, and
take two adapters of one number for the same, so here the number is computed from what the
adapter is. The same adapter has the same number everywhere, and after a restart.

vLLM names relied on: lora.request.LoRARequest (lora_name, lora_path, lora_int_id: above 0,
and what tells adapters apart in an engine).
"""

from __future__ import annotations

import hashlib

from msgspec.structs import replace
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreRequest


def fleet_number(lora: LoRARequest) -> int:
    """The number of an adapter, 1 to 2**62, made of its name and path."""
    named = f"{len(lora.lora_name)}:{lora.lora_name}{lora.lora_path}"
    digest = hashlib.sha256(named.encode()).digest()
    return 1 + int.from_bytes(digest[:8], "big") % 2**62


def fleet_adapter(lora: LoRARequest) -> LoRARequest:
    """The adapter as all workers know it."""
    return replace(lora, lora_int_id=fleet_number(lora))


def name_adapter(request: EngineCoreRequest) -> None:
    """Have ``request`` name its adapter, if it has one, as all workers know it."""
    if request.lora_request is not None:
        request.lora_request = fleet_adapter(request.lora_request)
