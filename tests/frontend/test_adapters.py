from __future__ import annotations

from vllm.lora.request import LoRARequest

from frontend.adapters import fleet_adapter, fleet_number, name_adapter
from tests.fakes import make_request


def test_an_adapter_has_one_number_whatever_a_server_calls_it() -> None:
    first, second = (LoRARequest("poet", number, "/adapters/poet") for number in (1, 5))
    assert fleet_number(first) == fleet_number(second) > 0
    assert fleet_adapter(first) == fleet_adapter(second)


def test_adapters_of_one_number_on_two_servers_are_told_apart() -> None:
    numbers = {
        fleet_number(LoRARequest(name, 1, path))
        for name, path in (("a", "/b/c"), ("a", "/c"), ("b", "/c"), ("a/", "b/c"))
    }
    assert len(numbers) == 4


def test_a_request_names_its_adapter_as_workers_know_it() -> None:
    request = make_request()
    name_adapter(request)
    assert request.lora_request is None
    request.lora_request = LoRARequest("poet", 1, "/adapters/poet")
    name_adapter(request)
    assert request.lora_request.lora_int_id == fleet_number(request.lora_request)
