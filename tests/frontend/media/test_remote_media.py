from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from email.utils import formatdate

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from frontend.admission import Admission, AdmissionLimits, FleetLoad, NotAdmitted
from frontend.media.remote_media import MAX_REDIRECTS, MediaServerFailed, RemoteMedia
from frontend.media.url_cache import UrlCache
from frontend.media.url_policy import MediaUnavailable, UrlPolicy
from tests.frontend.media.web import Site
from tests.frontend.test_admission import Engine

pytestmark = pytest.mark.anyio
MIB = 1 << 20
HERE = UrlPolicy([], allow_private=True)


@pytest.fixture(autouse=True)
def one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MEDIA_FETCH_MAX_RETRIES", "1")
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def cache() -> UrlCache:
    return UrlCache(MIB)


@pytest.fixture
async def remote(cache: UrlCache) -> AsyncIterator[RemoteMedia]:
    remote = RemoteMedia(HERE, cache)
    yield remote
    await remote.close()


async def fetch(
    remote: RemoteMedia, url: str, timeout: float = 30.0, max_bytes: int | None = None
) -> bytes:
    return await remote.fetch(url, timeout=timeout, max_bytes=max_bytes)


def redirect(to: str, status: int = 302) -> web.Response:
    return web.Response(status=status, headers={"Location": to, "Cache-Control": "max-age=60"})


async def test_many_at_once_fetch_once(remote: RemoteMedia, site: Site) -> None:
    go_on = asyncio.Event()

    async def slow(_: web.Request) -> web.Response:
        await go_on.wait()
        return web.Response(body=b"pixels")

    site.pages["/a"] = slow
    asked = [asyncio.create_task(fetch(remote, site.url("/a"))) for _ in range(64)]
    while not site.asked["/a"]:
        await asyncio.sleep(0.001)
    asked[0].cancel()
    go_on.set()
    assert await asyncio.gather(*asked[1:]) == [b"pixels"] * 63
    assert site.asked["/a"] == 1


async def test_what_is_fetched_counts_as_memory_of_its_request(
    remote: RemoteMedia, site: Site
) -> None:
    site.serve("/a", b"x" * 100)
    limits = AdmissionLimits(request_bytes=10, requests=1, body_bytes=250, body_seconds=1.0)
    admission = Admission(limits, Engine(), FleetLoad, CollectorRegistry())
    with admission.body():
        for _ in range(2):
            await asyncio.create_task(fetch(remote, site.url("/a")))
        assert admission.body_bytes == 200
        with pytest.raises(NotAdmitted) as refused:
            await fetch(remote, site.url("/a"))
        assert refused.value.http_status == 503
    assert admission.body_bytes == 0
    assert await fetch(remote, site.url("/a")) == b"x" * 100


async def test_a_fresh_response_is_used_without_asking(
    remote: RemoteMedia, site: Site, cache: UrlCache
) -> None:
    site.serve("/a", b"pixels", Cache_Control="max-age=60")
    for _ in range(3):
        assert await fetch(remote, site.url("/a#part")) == b"pixels"
    assert site.asked["/a"] == 1
    assert (cache.stats.misses, cache.stats.hits, cache.stats.renewed) == (1, 2, 0)


async def test_without_freshness_the_server_is_asked_each_time(
    remote: RemoteMedia, site: Site, cache: UrlCache
) -> None:
    def page(request: web.Request) -> web.Response:
        if request.headers.get("If-None-Match") == '"1"':
            return web.Response(status=304, headers={"ETag": '"1"'})
        return web.Response(body=b"pixels", headers={"ETag": '"1"'})

    site.pages["/a"] = page
    for _ in range(3):
        assert await fetch(remote, site.url("/a")) == b"pixels"
    assert site.asked["/a"] == 3
    assert (cache.stats.misses, cache.stats.renewed) == (1, 2)


async def test_what_has_changed_is_fetched_anew(remote: RemoteMedia, site: Site) -> None:
    site.serve("/a", b"old", ETag='"1"')
    assert await fetch(remote, site.url("/a")) == b"old"
    site.serve("/a", b"new", ETag='"2"')
    assert await fetch(remote, site.url("/a")) == b"new"


async def test_a_stale_response_is_asked_about(remote: RemoteMedia, site: Site) -> None:
    an_hour_ago = formatdate(time.time() - 3600, usegmt=True)
    site.serve("/a", b"a", Cache_Control="max-age=60", Date=an_hour_ago, ETag='"1"')
    for _ in range(2):
        await fetch(remote, site.url("/a"))
    assert site.asked["/a"] == 2


async def test_access_that_ends_is_noticed(
    remote: RemoteMedia, site: Site, cache: UrlCache
) -> None:
    site.serve("/a", b"secret", ETag='"1"', Last_Modified=formatdate(0, usegmt=True))
    await fetch(remote, site.url("/a"))
    site.serve("/a", b"", status=403)
    with pytest.raises(MediaUnavailable, match="HTTP 403"):
        await fetch(remote, site.url("/a"))
    assert cache.get(site.url("/a")) is None


async def test_credentials_open_nothing_for_others(remote: RemoteMedia, site: Site) -> None:
    def page(request: web.Request) -> web.Response:
        if "Authorization" not in request.headers and "key" not in request.query:
            return web.Response(status=401)
        return web.Response(body=b"secret", headers={"Cache-Control": "max-age=60"})

    site.pages["/a"] = page
    assert await fetch(remote, site.url("/a", userinfo="me:mine@")) == b"secret"
    assert await fetch(remote, site.url("/a?key=1")) == b"secret"
    for url in (site.url("/a"), site.url("/a?other=1")):
        with pytest.raises(MediaUnavailable, match="HTTP 401"):
            await fetch(remote, url)


async def test_cookies_of_one_are_not_sent_for_another(
    remote: RemoteMedia, site: Site
) -> None:
    site.serve("/login", b"", Set_Cookie="session=1; Path=/")
    site.serve("/a", b"")
    await fetch(remote, site.url("/login", host="localhost"))
    await fetch(remote, site.url("/a", host="localhost"))
    assert "Cookie" not in site.requests[-1].headers


async def test_redirects_are_followed_and_not_kept(remote: RemoteMedia, site: Site) -> None:
    site.pages["/a"] = lambda _: redirect("/b?x=1", 301)
    site.serve("/b", b"pixels", Cache_Control="max-age=60")
    for _ in range(2):
        assert await fetch(remote, site.url("/a")) == b"pixels"
    assert site.asked == {"/a": 2, "/b": 1}


async def test_a_password_goes_along_to_the_same_server_only(
    remote: RemoteMedia, site: Site
) -> None:
    site.pages["/a"] = lambda _: redirect("/b")
    site.pages["/b"] = lambda _: redirect(site.url("/c", host="localhost"))
    site.serve("/c", b"")
    await fetch(remote, site.url("/a", userinfo="me:mine@"))
    assert ["Authorization" in r.headers for r in site.requests] == [True, True, False]


async def test_redirects_end(remote: RemoteMedia, site: Site) -> None:
    site.pages["/a"] = lambda _: redirect("/a")
    with pytest.raises(MediaUnavailable, match="more than"):
        await fetch(remote, site.url("/a"))
    assert site.asked["/a"] == MAX_REDIRECTS + 1


async def test_redirects_can_be_forbidden(
    remote: RemoteMedia, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0")
    site.pages["/a"] = lambda _: redirect("/b")
    with pytest.raises(MediaUnavailable, match="not allowed"):
        await fetch(remote, site.url("/a"))
    assert site.asked == {"/a": 1}


@pytest.mark.parametrize("location", ["http://localhost:{}/b", "file:///etc/passwd", "http://["])
async def test_a_redirect_leads_to_no_forbidden_place(site: Site, location: str) -> None:
    remote = RemoteMedia(UrlPolicy(["127.0.0.1"], allow_private=False), UrlCache(MIB))
    site.pages["/a"] = lambda _: redirect(location.format(site.port))
    with pytest.raises(MediaUnavailable):
        await fetch(remote, site.url("/a"))
    assert site.asked == {"/a": 1}
    await remote.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0x7f.1", "127.1"])
async def test_this_host_is_not_asked_unless_that_is_allowed(site: Site, host: str) -> None:
    remote = RemoteMedia(UrlPolicy([], allow_private=False), UrlCache(MIB))
    with pytest.raises(MediaUnavailable):
        await fetch(remote, site.url("/a", host=host))
    assert not site.requests
    await remote.close()


async def test_a_kept_response_does_not_outlive_the_policy(
    remote: RemoteMedia, site: Site, cache: UrlCache
) -> None:
    site.serve("/a", b"pixels", Cache_Control="max-age=60")
    await fetch(remote, site.url("/a"))
    stricter = RemoteMedia(UrlPolicy([], allow_private=False), cache)
    with pytest.raises(MediaUnavailable):
        await fetch(stricter, site.url("/a"))


@pytest.mark.parametrize("status", [400, 403, 404, 410, 429])
async def test_what_the_server_refuses_is_the_clients_error(
    remote: RemoteMedia, site: Site, status: int
) -> None:
    site.serve("/a", b"", status=status)
    with pytest.raises(MediaUnavailable, match=f"HTTP {status}"):
        await fetch(remote, site.url("/a"))


async def test_a_failing_server_is_named_as_such(remote: RemoteMedia, site: Site) -> None:
    site.serve("/a", b"", status=500)
    with pytest.raises(MediaServerFailed) as failure:
        await fetch(remote, site.url("/a"))
    assert failure.value.http_status == 502
    with pytest.raises(MediaServerFailed) as failure:
        await fetch(remote, "http://127.0.0.1:1/a")
    assert failure.value.http_status == 502


async def test_a_slow_server_is_given_up(remote: RemoteMedia, site: Site) -> None:
    async def never(_: web.Request) -> web.Response:
        await asyncio.sleep(60)
        raise AssertionError

    site.pages["/a"] = never
    with pytest.raises(MediaServerFailed, match="in time") as failure:
        await fetch(remote, site.url("/a"), timeout=0.05)
    assert failure.value.http_status == 504


async def test_a_transient_failure_is_tried_again(
    remote: RemoteMedia, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_MEDIA_FETCH_MAX_RETRIES", "2")
    monkeypatch.setattr("vllm.connections._RETRY_BACKOFF_FACTOR", 0.01)

    def page(_: web.Request) -> web.Response:
        return web.Response(status=503 if site.asked["/a"] == 1 else 200, body=b"pixels")

    site.pages["/a"] = page
    assert await fetch(remote, site.url("/a"), timeout=1000.0) == b"pixels"
    assert site.asked["/a"] == 2


@pytest.mark.parametrize("says_length", [True, False])
async def test_too_much_is_not_read(
    remote: RemoteMedia, site: Site, monkeypatch: pytest.MonkeyPatch, says_length: bool
) -> None:
    monkeypatch.setenv("VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB", "1")

    async def page(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        if says_length:
            response.content_length = 4 * MIB
        await response.prepare(request)
        for _ in range(4):
            await response.write(bytes(MIB))
        return response

    site.pages["/a"] = page
    with pytest.raises(MediaUnavailable, match="exceeds"):
        await fetch(remote, site.url("/a"))


async def test_nonsense_is_no_url(remote: RemoteMedia) -> None:
    for url in ("", "picture.png", "http://", "http://[", "http://a:99999/", "http://a b/"):
        with pytest.raises((MediaUnavailable, MediaServerFailed)):
            await fetch(remote, url)
