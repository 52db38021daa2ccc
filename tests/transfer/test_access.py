"""Keys, who gets in with them, and which addresses need them."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import AsyncIterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import zmq

from tests.fakes import eventually, within
from transfer.access import (
    Access,
    Authenticator,
    frontend_access,
    make_keys,
    worker_access,
)
from transfer.errors import BadKeys, TransferError
from transfer.link import FrontendLink, KvPublisher, KvSubscriber, WorkerLink
from transfer.make_keys import main
from transfer.messages import KvDelta, Message, Ping, Pong, encode

pytestmark = pytest.mark.anyio

HERE = "tcp://127.0.0.1:*"
ROUNDS = 20


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


class Guarded:
    """A worker's two sockets, with or without keys, and those that knock at them."""

    def __init__(self, access: Access) -> None:
        self.context = zmq.Context()
        self._open = ExitStack()
        authenticator = Authenticator(self.context, access)
        self._open.callback(self.context.term)
        self._open.callback(authenticator.close)
        self.link = self._open.enter_context(closing(WorkerLink(self.context, HERE, access)))
        self.kv = self._open.enter_context(closing(KvPublisher(self.context, HERE, access)))
        self.heard: list[tuple[str, Message]] = []

    async def listen(self) -> None:
        await self.link.listen(lambda name, message, _: self._hear(name, message))

    def _hear(self, name: str, message: Message) -> None:
        self.heard.append((name, message))
        self.link.send(name, Pong())

    def frontend(self, name: str, access: Access) -> FrontendLink:
        link = FrontendLink(self.context, name, self.link.address, access)
        return self._open.enter_context(closing(link))

    def subscriber(self, access: Access) -> KvSubscriber:
        subscriber = KvSubscriber(self.context, self.kv.address, access)
        return self._open.enter_context(closing(subscriber))

    def raw(self, kind: int) -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        return self._open.enter_context(socket)

    def close(self) -> None:
        self._open.close()


@pytest.fixture
async def guarded(keys: Path) -> AsyncIterator[Guarded]:
    with closing(Guarded(worker_access(keys))) as guarded:
        listening = asyncio.create_task(guarded.listen())
        yield guarded
        listening.cancel()


async def until_published(guarded: Guarded, subscriber: KvSubscriber) -> KvDelta:
    """Publish until it is heard: a subscription takes a while to get there."""
    hearing = asyncio.ensure_future(subscriber.receive())

    def heard() -> bool:
        guarded.kv.publish(KvDelta("e", 1))
        return hearing.done()

    await eventually(heard)
    delta = hearing.result()
    assert isinstance(delta, KvDelta)
    return delta


def test_keys_are_for_their_owner_only(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "keys"
    assert main([str(directory)]) == 0
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    files = sorted(directory.iterdir())
    assert [path.name for path in files] == [
        "frontend.key", "frontend.key_secret", "worker.key", "worker.key_secret"
    ]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_keys_are_not_overwritten(keys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in keys.iterdir()}
    assert main([str(keys)]) == 2
    assert "not empty" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in keys.iterdir()} == before


def test_each_side_needs_its_own_half_only(keys: Path) -> None:
    (keys / "frontend.key_secret").rename(keys / "elsewhere")
    assert worker_access(keys).keys is not None
    with pytest.raises(BadKeys, match="make_keys"):
        frontend_access(keys)
    (keys / "elsewhere").rename(keys / "frontend.key_secret")
    (keys / "worker.key_secret").unlink()
    assert frontend_access(keys).keys is not None


@pytest.mark.parametrize("content", [b"", b"public-key = ", b"\xff\xfe", b"x" * 5000])
def test_what_is_no_key_is_refused(keys: Path, content: bytes) -> None:
    (keys / "worker.key_secret").write_bytes(content)
    with pytest.raises(BadKeys):
        worker_access(keys)


def test_a_secret_that_others_can_read_is_refused(keys: Path) -> None:
    (keys / "worker.key_secret").chmod(0o640)
    with pytest.raises(BadKeys, match="0600"):
        worker_access(keys)


@pytest.mark.parametrize("place", ["", "frontend.key"])
def test_keys_that_others_could_put_their_own_beside_are_refused(
    keys: Path, place: str
) -> None:
    (keys / place).chmod(0o770 if not place else 0o620)
    with pytest.raises(BadKeys, match="can be changed by other users"):
        worker_access(keys)
    (keys / place).chmod(0o1777 if not place else 0o644)  # as Kubernetes mounts secrets
    worker_access(keys)


def test_a_secret_is_not_shown(keys: Path) -> None:
    access = worker_access(keys)
    assert access.keys is not None
    assert access.keys.secret.decode() not in repr(access)


@pytest.mark.parametrize(
    "address",
    ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://[::]:0", "tcp://10.0.0.7:5", "tcp://eth0:5"],
)
def test_an_address_open_to_other_hosts_needs_keys(address: str, keys: Path) -> None:
    with zmq.Context() as context:
        for end in (WorkerLink, KvPublisher):
            with pytest.raises(TransferError, match=r"--secure-keys.*--insecure"):
                end(context, address)
    Access(insecure=True).check(address)
    worker_access(keys).check(address)


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:0", "tcp://[::1]:0", "tcp://localhost:0", "ipc:///a"]
)
def test_an_address_of_this_host_does_not(address: str) -> None:
    Access().check(address)


def test_what_is_told_to_be_insecure_listens_everywhere() -> None:
    access = Access(insecure=True)
    with zmq.Context() as context, closing(WorkerLink(context, "tcp://*:*", access)) as link:
        assert link.address.startswith("tcp://")


async def test_holders_of_the_keys_speak_with_each_other(guarded: Guarded, keys: Path) -> None:
    access = frontend_access(keys)
    frontend = guarded.frontend("f", access)
    for _ in range(ROUNDS):
        frontend.send(Ping())
        message, _ = await within(frontend.receive())
        assert message == Pong()
    assert guarded.heard == [("f", Ping())] * ROUNDS
    assert await until_published(guarded, guarded.subscriber(access)) == KvDelta("e", 1)


async def test_what_goes_over_the_wire_cannot_be_read(keys: Path) -> None:
    words: list[bytes] = []

    async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = int(guarded.link.address.rpartition(":")[2])
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port)

        async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            while data := await source.read(4096):
                words.append(data)
                target.write(data)
            target.close()

        await asyncio.gather(copy(reader, there_writer), copy(there_reader, writer))

    with closing(Guarded(worker_access(keys))) as guarded:
        listening = asyncio.create_task(guarded.listen())
        server = await asyncio.start_server(between, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        link = FrontendLink(
            guarded.context, "f", f"tcp://127.0.0.1:{port}", frontend_access(keys)
        )
        with closing(link):
            link.send(Ping())
            await within(link.receive())
        listening.cancel()
        server.close()
    assert len(b"".join(words)) > 200
    assert b"Ping" not in b"".join(words) and b"Pong" not in b"".join(words)


async def test_strangers_are_not_heard(
    guarded: Guarded, keys: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_keys(tmp_path / "others")
    others = frontend_access(tmp_path / "others")
    ours = frontend_access(keys)
    assert others.keys is not None and ours.keys is not None
    # Knows the workers' public key, and has a pair of its own making.
    guesser = Access(
        type(ours.keys)(others.keys.public, others.keys.secret, ours.keys.peer)
    )
    strangers = [
        guarded.frontend(f"stranger-{number}", access)
        for number, access in enumerate((Access(), others, guesser))
    ]
    for stranger in strangers:
        stranger.watch_breaks(lambda: None)
        stranger.send(Ping())
    raw = guarded.raw(zmq.DEALER)
    raw.connect(guarded.link.address)
    raw.send_multipart(encode(Ping()))
    overheard = guarded.raw(zmq.SUB)
    overheard.setsockopt(zmq.SUBSCRIBE, b"")
    overheard.connect(guarded.kv.address)
    deaf = [guarded.subscriber(access) for access in (others, guesser)]
    # By the time that a friend has been heard many times, they would have been too.
    await eventually(lambda: all(stranger.refused for stranger in strangers))
    friend = guarded.frontend("friend", ours)
    listener = guarded.subscriber(ours)
    for _ in range(ROUNDS):
        friend.send(Ping())
        await within(friend.receive())
        await until_published(guarded, listener)
    assert {name for name, _ in guarded.heard} == {"friend"}
    assert not overheard.poll(0)
    for subscriber in deaf:
        assert not subscriber._socket.poll(0)
    assert caplog.text.count("do not accept each other") == len(strangers)


async def test_a_frontend_with_keys_speaks_to_no_worker_without(keys: Path) -> None:
    with closing(Guarded(Access())) as open_worker:
        listening = asyncio.create_task(open_worker.listen())
        link = open_worker.frontend("f", frontend_access(keys))
        link.watch_breaks(lambda: None)
        link.send(Ping())
        await eventually(lambda: link.refused)
        assert open_worker.heard == []
        listening.cancel()


async def test_a_worker_that_comes_back_with_the_right_keys_is_used_again(
    keys: Path,
) -> None:
    access = worker_access(keys)
    with closing(Guarded(Access())) as open_worker:
        address = open_worker.link.address
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        link = FrontendLink(context, "f", address, frontend_access(keys))
        link.watch_breaks(lambda: None)
        await eventually(lambda: link.refused)
    with ExitStack() as stack:
        stack.callback(context.term)
        stack.callback(link.close)
        worker_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stack.callback(worker_context.term)
        stack.enter_context(closing(Authenticator(worker_context, access)))
        worker = stack.enter_context(closing(WorkerLink(worker_context, address, access)))
        heard: asyncio.Queue[str] = asyncio.Queue()
        listening = asyncio.create_task(worker.listen(lambda name, *_: heard.put_nowait(name)))
        await eventually(lambda: not link.refused)
        link.send(Ping())
        assert await within(heard.get()) == "f"
        listening.cancel()


@pytest.mark.parametrize("address", ["", "tcp://", "nonsense", "tcp://h:port", "udp://h:5"])
def test_what_is_no_address_is_not_connected_to(address: str) -> None:
    with zmq.Context() as context:
        for connect in (
            lambda: FrontendLink(context, "f", address),
            lambda: KvSubscriber(context, address),
        ):
            with pytest.raises(TransferError, match="no address"):
                connect()
