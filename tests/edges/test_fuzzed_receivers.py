"""Whatever a peer sends, its receiver stays alive and hears the next one.

The decoders alone are fuzzed in ``tests/transfer/test_messages.py`` and
``test_payload.py``. Here it is what stands
behind them, with bytes and with messages that decode but make no sense.
"""

from __future__ import annotations

import asyncio
import logging
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from frontend.preprocess import messages as preprocess_messages
from frontend.router.kv_index import KvIndex
from frontend.router.kv_plane import KvPlane
from frontend.router.worker_load import LoadBook
from tests.fakes import FakeEngine, FakeWorker, make_facts, make_request, within
from tests.frontend.fleets import Fleet
from tests.transfer.test_messages import ALL_MESSAGES
from tests.workers.lines import Line
from transfer import messages
from transfer.errors import BadMessage, ReadFailed
from transfer.messages import Frame, decode, encode
from transfer.nixl.agent import NixlAgent
from transfer.payload import encode_payload
from transfer.process import same_host_key
from transfer.registry import Registry
from transfer.tensor_ref import ArenaId, RemoteArena

pytestmark = pytest.mark.anyio

NAMES = st.sampled_from(["", "r", "s", "../../etc", "\0", "é" * 300])
NUMBERS = st.one_of(
    st.integers(0, 5), st.sampled_from([-1, 1 << 31, 1 << 48, (1 << 63) - 1, 1 << 63])
)
DIGESTS = st.lists(st.binary(max_size=40), max_size=4)
MEDIA = st.dictionaries(NAMES, DIGESTS, max_size=2)

# Anything that could stand in a field, so that most of it does not fit.
VALUES: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), NUMBERS, NAMES, st.binary(max_size=40),
    st.floats(), st.lists(NAMES, max_size=3), MEDIA,
    st.lists(st.one_of(NAMES, NUMBERS, st.binary(max_size=20)), max_size=5),
)


@st.composite
def any_message(draw: st.DrawFn) -> bytes:
    """A message of ours with some fields replaced by anything."""
    built = msgspec.to_builtins(draw(st.sampled_from(ALL_MESSAGES)), builtin_types=(bytes,))
    for name in draw(st.lists(st.sampled_from(sorted(built)), max_size=3)):
        if name != "type" or draw(st.booleans()):
            built[name] = draw(VALUES)
    return msgspec.msgpack.encode(built)


def mutated(payload: Sequence[Frame], rng: random.Random) -> list[Frame]:
    head = bytearray(payload[0])
    for _ in range(rng.randrange(4)):
        head[rng.randrange(len(head))] = rng.randrange(256)
    return [head[: rng.randrange(len(head))] if rng.random() < 0.3 else head, *payload[1:]]


PAYLOADS: list[list[Frame]] = [
    [], [b""], [b"\xc1"], [b"\x90"], list(encode_payload(["pin_lora", 1])),
    list(encode_payload([])), list(encode_payload(make_request("r"))),
]

FRAMES = st.one_of(
    st.lists(st.binary(max_size=100), max_size=3),
    st.builds(
        lambda head, body: [head, *body], any_message(), st.sampled_from(PAYLOADS)
    ),
)

often = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


class TakesAll(FakeEngine):
    """What decodes as a request is not what is tested here."""

    def add(self, frames: Sequence[Frame]) -> None:
        self.added.put_nowait(make_request())


async def hears_on(worker: FakeWorker, line: Line) -> None:
    """Check that a worker still answers."""
    line.say(line.hello())
    while not isinstance(message := (await within(line._link.receive()))[0], messages.Pong):
        if isinstance(message, messages.Ready):  # who said Bye is not heard before
            line.say(messages.Ping())
    assert not any(task.done() for task in worker._tasks)


async def _to_a_worker(received: list[list[bytes]]) -> None:
    with tempfile.TemporaryDirectory(prefix="fv-") as directory:
        registry = Registry(Path(directory), "fuzz")
        worker = FakeWorker(registry)
        worker.engine.__class__ = TakesAll
        async with worker, Line(worker) as line:
            await line.greet()
            for frames in received:
                line._link._put(frames or [b""])
            await hears_on(worker, line)
            assert decode(encode(worker.load.report()))[0] == worker.load.report()


@often
@given(st.lists(FRAMES, max_size=8))
def test_a_worker_survives_what_frontends_send(received: list[list[bytes]]) -> None:
    asyncio.run(_to_a_worker(received))


async def _to_a_frontend(
    on_requests: list[list[bytes]], on_kv: list[list[bytes]]
) -> None:
    with tempfile.TemporaryDirectory(prefix="fv-") as directory:
        async with Fleet(Registry(Path(directory), "fuzz")) as fleet:
            worker = await fleet.start()
            for frames in on_requests:
                worker.link._put([fleet.hello.frontend.encode(), *frames])
            for frames in on_kv:
                worker.kv_publisher._put(frames or [b""])
            # It may have been lost over this, and is found again.
            await fleet.until_ready("worker-1")
            request = make_request("after")
            await within(fleet.client.add_request_async(request))
            assert len(await fleet.answer("after")) == 3


def harmless(frames: list[bytes]) -> bool:
    """Whether a message is none by which a worker takes leave or becomes another one."""
    try:
        message, _ = decode(frames)
    except BadMessage:
        return True
    return not isinstance(message, messages.Bye | messages.Ready | messages.Refused)


@settings(often, max_examples=25)
@given(
    st.lists(FRAMES.filter(harmless), max_size=8), st.lists(FRAMES, max_size=4)
)
def test_a_frontend_survives_what_workers_send(
    on_requests: list[list[bytes]], on_kv: list[list[bytes]]
) -> None:
    asyncio.run(_to_a_frontend(on_requests, on_kv))


@given(st.lists(any_message(), max_size=12))
def test_the_kv_plane_takes_any_order_of_anything(received: list[bytes]) -> None:
    plane, book = KvPlane(KvIndex(), max_waiting=4), LoadBook()
    plane.on_ready("w", "e")
    for data in received:
        try:
            message, _ = decode([data])
        except BadMessage:
            continue
        match message:
            case messages.KvDelta():
                plane.on_delta("w", message)
            case messages.KvSnapshot():
                plane.on_snapshot("w", message)
            case messages.Pong():
                plane.on_heartbeat("w", message.epoch, message.seq)
            case messages.LoadReport():
                plane.on_position("w", message.epoch, message.seq)
                book.report("w", message, "f")
    plane.on_lost("w")
    assert plane.seq("w") == 0


@given(st.lists(st.integers(0, (1 << 48) - 1), min_size=1, max_size=50))
def test_what_many_requests_were_charged_fits_into_a_report(charges: list[int]) -> None:
    for charge in charges:
        message = messages.AddRequest("r", prefill_tokens=charge)
        assert decode(encode(message))[0] == message
    shares = {"f": messages.FrontendShare(len(charges), sum(charges))}
    report = messages.LoadReport(epoch="e", seq=1, shares=shares)
    assert decode(encode(report))[0] == report


@pytest.mark.parametrize("charge", [-1, 1 << 48, 1 << 63])
def test_a_charge_that_would_not_is_refused(charge: int) -> None:
    with pytest.raises(BadMessage):
        decode(encode(messages.AddRequest("r", prefill_tokens=charge)))


@given(st.binary(max_size=300))
def test_preprocess_messages_are_good_or_bad(data: bytes) -> None:
    with suppress(BadMessage):
        preprocess_messages.decode(data)


RECORD = st.fixed_dictionaries({}, optional={
    "worker": VALUES, "address": VALUES, "pid": VALUES, "start_time": VALUES,
    "host": VALUES, "facts": VALUES,
})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.one_of(st.binary(max_size=100), RECORD), st.sampled_from(["w", "..", "a b"]))
def test_files_in_the_registry_may_hold_anything(
    tmp_path: Path, content: bytes | dict[str, Any], name: str
) -> None:
    (tmp_path / "r").mkdir(mode=0o700, exist_ok=True)
    registry = Registry(tmp_path / "r", "fuzz")
    good = {
        "worker": "w", "address": "ipc:///w", "pid": 1, "start_time": 1, "host": "elsewhere",
        "facts": msgspec.to_builtins(make_facts()),
    }
    data = content if isinstance(content, bytes) else _json({**good, **content})
    for earlier in registry.path.glob("*.json"):
        earlier.unlink()
    (registry.path / f"{name}.json").write_bytes(data)
    for found in registry.records().values():
        assert found.worker == name


def _json(record: dict[str, Any]) -> bytes:
    return msgspec.json.encode(record, enc_hook=str)


def test_a_record_of_another_workers_name_removes_nothing(registry: Registry) -> None:
    """A dead worker is swept by the name in its record."""
    precious = registry.path.parent / "precious.d"
    precious.mkdir()
    facts = msgspec.to_builtins(make_facts())
    dead = {
        "worker": "../precious", "address": "ipc:///w", "pid": 2**22 - 1, "start_time": 1,
        "host": same_host_key(), "facts": facts,
    }
    (registry.path / "w.json").write_bytes(msgspec.json.encode(dead))
    assert registry.records() == {}
    assert precious.is_dir()


async def test_a_record_with_no_address_costs_the_others_nothing(registry: Registry) -> None:
    facts = msgspec.to_builtins(make_facts())
    bad = {
        "worker": "bad", "address": "nonsense", "pid": 1, "start_time": 1, "host": "elsewhere",
        "facts": facts,
    }
    async with Fleet(registry) as fleet:
        (registry.path / "bad.json").write_bytes(msgspec.json.encode(bad))
        await fleet.start("good")
        assert list(fleet.pool.ready_workers()) == ["good"]


@pytest.mark.parametrize(
    "offer",
    [
        RemoteArena(ArenaId("foveal-1-1-ab", b"n" * 16), "agent", b"metadata", 0, 0),
        RemoteArena(ArenaId("../../x", b""), "", b"", -1, -1),
        RemoteArena(ArenaId("", b"n"), "a" * 5000, bytes(5000), (1 << 64) - 1, 1 << 63),
    ],
)
async def test_an_offer_of_what_is_no_arena_is_declined(
    registry: Registry, offer: RemoteArena
) -> None:
    async with FakeWorker(registry, cache_gib=0.01) as worker, Line(worker) as line:
        await line.greet()
        line.say(messages.NixlOffer(offer))
        chosen, _ = await line.hear(messages.TransferChosen)
        assert chosen.transfer == "inline"
        await hears_on(worker, line)


@pytest.mark.nixl
def test_metadata_of_no_agent_is_refused() -> None:
    agent = NixlAgent(memoryview(bytearray(1 << 16)), "fuzz")
    try:
        rng = random.Random(7)
        garbage = [b"", b"x", bytes(100), rng.randbytes(2000)]
        for _ in range(50):
            data = bytearray(agent.metadata)
            data[rng.randrange(len(data))] = rng.randrange(256)
            garbage.append(bytes(data[: rng.randrange(len(data))]))
        for data in garbage:
            with pytest.raises(ReadFailed):
                agent.add_peer("somebody", data)
    finally:
        agent.close()


async def test_what_is_mutated_on_the_way_ends_its_request_only(registry: Registry) -> None:
    rng = random.Random(3)
    good = encode_payload(make_request("r"))
    async with FakeWorker(registry) as worker, Line(worker) as line:
        worker.engine.__class__ = TakesAll
        await line.greet()
        for number in range(200):
            line.say(messages.AddRequest(f"r{number}"), mutated(good, rng))
        await hears_on(worker, line)
