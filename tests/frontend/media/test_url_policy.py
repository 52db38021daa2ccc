from __future__ import annotations

import socket

import pytest
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from frontend.media.url_policy import MediaUnavailable, PolicedResolver, UrlPolicy

PRIVATE = [
    "127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.5.5", "169.254.169.254", "0.0.0.0",
    "100.64.0.1", "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fd00::1",
    "::ffff:127.0.0.1", "::ffff:169.254.169.254", "2002:a00:1::", "64:ff9b::a00:1",
]
PUBLIC = ["93.184.216.34", "2606:2800:220:1::1", "::ffff:93.184.216.34"]


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


class Names(AbstractResolver):
    """Knows a few names."""

    def __init__(self, *addresses: str) -> None:
        self._addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        return [
            ResolveResult(hostname=host, host=a, port=port, family=family, proto=0, flags=0)
            for a in self._addresses
        ]

    async def close(self) -> None:
        pass


async def addresses_of(policy: UrlPolicy, host: str, *addresses: str) -> list[str]:
    found = await PolicedResolver(policy, Names(*addresses)).resolve(host, 80)
    return [result["host"] for result in found]


def in_url(address: str) -> str:
    return f"[{address}]" if ":" in address else address


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses_are_refused(address: str) -> None:
    with pytest.raises(MediaUnavailable, match="not a public address"):
        UrlPolicy([], False).check(URL(f"http://{in_url(address)}:8080/a.png"))
    UrlPolicy([], True).check(URL(f"http://{in_url(address)}:8080/a.png"))


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are_not(address: str) -> None:
    UrlPolicy([], False).check(URL(f"https://{in_url(address)}/a.png"))


@pytest.mark.anyio
@pytest.mark.parametrize("address", PRIVATE)
async def test_names_of_private_addresses_are_refused(address: str) -> None:
    with pytest.raises(MediaUnavailable, match="innocent"):
        await addresses_of(UrlPolicy([], False), "innocent.example", address)
    assert await addresses_of(UrlPolicy([], True), "innocent.example", address) == [address]


@pytest.mark.anyio
async def test_a_name_with_both_leads_only_to_the_public_ones() -> None:
    found = await addresses_of(UrlPolicy([], False), "a.example", "10.0.0.1", *PUBLIC)
    assert found == PUBLIC


class Rebinding(Names):
    """Answers with a public address first, and with a private one from then on."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await super().resolve(host, port, family)
        self._addresses = ("127.0.0.1",)
        return found


@pytest.mark.anyio
async def test_a_name_that_changes_its_address_is_checked_each_time() -> None:
    resolver = PolicedResolver(UrlPolicy([], False), Rebinding(PUBLIC[0]))
    # What was checked is what is connected to; nobody asks a second time in between.
    [first] = await resolver.resolve("rebinding.example", 80)
    assert first["host"] == PUBLIC[0]
    with pytest.raises(MediaUnavailable, match="not a public address"):
        await resolver.resolve("rebinding.example", 80)


@pytest.mark.anyio
async def test_listed_domains_are_trusted_and_no_others_are_asked() -> None:
    policy = UrlPolicy(["intranet.example", "10.0.0.5"], False)
    policy.check(URL("http://intranet.example/a.png"))
    policy.check(URL("http://INTRANET.example:81/a.png"))
    policy.check(URL("http://10.0.0.5/a.png"))
    assert await addresses_of(policy, "intranet.example", "10.0.0.1") == ["10.0.0.1"]
    for url in ("http://other.example/", "http://intranet.example@other.example/",
                "http://sub.intranet.example/", "http://intranet.example.evil.example/"):
        with pytest.raises(MediaUnavailable, match="allowed domains"):
            policy.check(URL(url))


@pytest.mark.parametrize("url", ["ftp://a.example/", "file:///etc/passwd", "a.png", "http:///"])
def test_other_schemes_are_refused(url: str) -> None:
    with pytest.raises(MediaUnavailable, match="HTTP"):
        UrlPolicy([], True).check(URL(url))


@pytest.mark.anyio
async def test_a_proxy_may_be_private_but_is_no_source_of_media(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    policy = UrlPolicy([], False)
    assert await addresses_of(policy, "proxy.example", "10.0.0.1") == ["10.0.0.1"]
    with pytest.raises(MediaUnavailable):
        policy.check(URL("http://proxy.example:3128/a.png"))
