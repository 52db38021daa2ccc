"""What frontends may call of the engine, and what they are answered."""

from __future__ import annotations

import pytest

from tests.fakes import FakeWorker, within
from tests.workers.lines import Line
from transfer.messages import Call, CallResult
from transfer.payload import decode_payload_as, encode_payload

pytestmark = pytest.mark.anyio


async def test_a_call_is_made_and_answered(worker: FakeWorker, line: Line) -> None:
    await line.greet()
    worker.engine.answers["pin_lora"] = True
    line.say(Call(7, "pin_lora"), encode_payload([3]))
    result, payload = await line.hear(CallResult)
    assert (result.call_id, result.error) == (7, None)
    assert decode_payload_as(object, payload) is True
    assert await within(worker.engine.called.get()) == ("pin_lora", 3)


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("shutdown", encode_payload([])),
        ("__init__", encode_payload([])),
        ("add_lora", encode_payload({"not": "a list"})),
        ("add_lora", [b"\xc1"]),
        ("collective_rpc", encode_payload([])),
        ("collective_rpc", encode_payload([b"pickled"])),
        ("collective_rpc", encode_payload([["reset_weights"]])),
        ("collective_rpc", encode_payload(["attach_arena", None, ["a", b"n"]])),
        ("collective_rpc", encode_payload(["synchronize_device"])),
        ("collective_rpc", encode_payload(["__init__"])),
    ],
)
async def test_a_call_that_is_not_for_frontends_is_answered_with_an_error(
    worker: FakeWorker, line: Line, method: str, arguments: list[bytes]
) -> None:
    await line.greet()
    line.say(Call(1, method), arguments)
    result, _ = await line.hear(CallResult)
    assert result.error is not None and result.error.startswith(f"{method}: ")
    assert worker.engine.called.empty()


async def test_a_result_that_cannot_be_sent_is_an_error(
    worker: FakeWorker, line: Line
) -> None:
    await line.greet()
    worker.engine.answers["is_sleeping"] = object()
    line.say(Call(1, "is_sleeping"), encode_payload([]))
    result, _ = await line.hear(CallResult)
    assert result.error is not None


@pytest.mark.parametrize(
    ("method", "answer", "emptied"),
    [
        ("reset_prefix_cache", True, True),
        ("reset_prefix_cache", False, False),
        ("sleep", None, True),
        ("pin_lora", True, False),
    ],
)
async def test_a_call_that_empties_the_cache_is_told_at_once(
    worker: FakeWorker, line: Line, method: str, answer: object, emptied: bool
) -> None:
    await line.greet()
    worker.hold([b"a" * 32])
    worker.engine.answers[method] = answer
    line.say(Call(1, method), encode_payload([]))
    await line.hear(CallResult)
    assert worker.kv_state.snapshot().blocks == ({} if emptied else {"GPU": [b"a" * 32]})
