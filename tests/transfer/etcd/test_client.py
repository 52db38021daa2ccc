"""The calls to a real etcd, with a user and a password too."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest
from aiohttp import web

from tests.etcd_server import EtcdServer
from tests.fakes import within
from transfer.errors import EtcdUnavailable
from transfer.etcd.address import parse_etcd_address
from transfer.etcd.client import Change, EtcdClient, WatchLost

pytestmark = pytest.mark.anyio


def post(etcd: EtcdServer, path: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{etcd.port}/v3/{path}", json.dumps(body).encode()
    )
    urllib.request.urlopen(request, timeout=10).close()


def with_password(etcd: EtcdServer) -> None:
    """Let in only root, whose password is `secret`."""
    post(etcd, "auth/user/add", {"name": "root", "password": "secret"})
    post(etcd, "auth/role/add", {"name": "root"})
    post(etcd, "auth/user/grant", {"user": "root", "role": "root"})
    post(etcd, "auth/enable", {})


async def test_a_lease_that_ends_takes_its_keys_along(etcd: EtcdServer) -> None:
    client = EtcdClient(parse_etcd_address(etcd.address))
    lease = await client.grant(60)
    await client.put("a/1", b"one", lease)
    await client.put("a/2", b"", lease)
    await client.put("b", b"other", lease)
    assert (await client.read("a/"))[0] == {"a/1": b"one", "a/2": b""}
    assert await client.keep_alive(lease)
    await client.revoke(lease)
    assert (await client.read("a/"))[0] == {}
    assert not await client.keep_alive(lease)
    with pytest.raises(EtcdUnavailable, match="lease not found"):
        await client.put("a/1", b"one", lease)
    await client.close()


async def test_who_comes_first_sets_a_key(etcd: EtcdServer) -> None:
    client = EtcdClient(parse_etcd_address(etcd.address))
    assert await client.put_if_absent("k", b"\x00first") == b"\x00first"
    assert await client.put_if_absent("k", b"second") == b"\x00first"
    await client.close()


async def test_a_watch_tells_what_came_after_it_was_read(etcd: EtcdServer) -> None:
    client = EtcdClient(parse_etcd_address(etcd.address))
    lease = await client.grant(60)
    _, revision = await client.read("a/")
    await client.put("a/1", b"one", lease)
    await client.put("b/1", b"not asked for", lease)
    await client.delete("a/1")
    seen: list[Change] = []

    async def look() -> None:
        async for changes in client.watch("a/", revision, 60.0):
            seen.extend(changes)
            if len(seen) == 2:
                return

    await within(look())
    assert seen == [Change("a/1", b"one"), Change("a/1", None)]
    await client.close()


async def test_a_watch_ends_in_time(etcd: EtcdServer) -> None:
    client = EtcdClient(parse_etcd_address(etcd.address))

    async def look() -> None:
        async for _ in client.watch("a/", 1, 0.2):
            pass

    with pytest.raises(WatchLost):
        await within(look())
    await client.close()


async def test_a_password_is_needed_and_given_again_after_a_restart(
    etcd: EtcdServer,
) -> None:
    with_password(etcd)
    stranger = EtcdClient(parse_etcd_address(etcd.address))
    with pytest.raises(EtcdUnavailable, match="user name is empty"):
        await stranger.read("a/")
    await stranger.close()
    wrong = EtcdClient(parse_etcd_address(f"etcd://root:no@127.0.0.1:{etcd.port}"))
    with pytest.raises(EtcdUnavailable, match="authentication failed"):
        await wrong.read("a/")
    await wrong.close()
    client = EtcdClient(parse_etcd_address(f"etcd://root:secret@127.0.0.1:{etcd.port}"))
    assert (await client.read("a/"))[0] == {}
    etcd.kill()  # and with it all tokens
    etcd.start()
    assert await client.put_if_absent("a/1", b"x") == b"x"
    await client.close()


async def test_nobody_there_is_one_sentence_without_the_password() -> None:
    client = EtcdClient(parse_etcd_address("etcd://me:secret@127.0.0.1:1"))
    with pytest.raises(EtcdUnavailable, match=r"^etcd at 127\.0\.0\.1:1: ") as refusal:
        await client.grant(5)
    assert "secret" not in str(refusal.value)
    await client.close()


@pytest.mark.parametrize("text", ["{}", "[]", "null", "7", '{"kvs": [{"key": 1}]}', "<html>"])
async def test_what_is_no_etcd_is_said_to_be_none(text: str) -> None:
    """A proxy in front of it, say. Whoever keeps trying must not end over it."""

    async def reply(_: web.Request) -> web.Response:
        return web.Response(text=text)

    app = web.Application()
    app.router.add_post("/{rest:.*}", reply)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    client = EtcdClient(parse_etcd_address(f"etcd://127.0.0.1:{port}"))
    try:
        for call in (
            client.grant(60), client.read("a/"), client.put_if_absent("k", b"v"),
        ):
            with pytest.raises(EtcdUnavailable):
                await within(call)
        with pytest.raises(WatchLost):
            async for changes in client.watch("a/", 1, 5.0):
                assert not changes
    finally:
        await client.close()
        await runner.cleanup()

