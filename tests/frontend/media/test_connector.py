"""Through vLLM's own app and renderer, less the workers."""

from __future__ import annotations

import asyncio
import io
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile
from prometheus_client import CollectorRegistry
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media.base import MediaIO
from vllm.multimodal.media.image import ImageMediaIO

from frontend.admission import Admission, AdmissionLimits, FleetLoad
from frontend.large_bodies import LARGE_BYTES, LargeBodies
from frontend.media.connector import AT_ONCE, CONNECTOR, LazyImageIO, LazyMediaConnector
from frontend.media.remote_media import RemoteMedia
from frontend.media.url_cache import UrlCache
from frontend.media.url_policy import MediaUnavailable, UrlPolicy
from frontend.receipt import Receipt, current_receipt
from tests.fakes import PATIENCE, within
from tests.frontend.app import APP_MARKS, App, by_url, in_place
from tests.frontend.media.web import Site
from tests.frontend.test_admission import Engine

pytestmark = [
    *APP_MARKS,
    # Pillow's, about the conversion of a palette to L.
    pytest.mark.filterwarnings("ignore:Palette images with Transparency:UserWarning"),
]


@pytest.fixture(autouse=True)
def our_connector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MEDIA_CONNECTOR", CONNECTOR)
    monkeypatch.setenv("VLLM_MEDIA_FETCH_MAX_RETRIES", "1")


class Decoding:
    """Counts images that are decoded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        load_bytes = ImageMediaIO.load_bytes

        def counting(media_io: ImageMediaIO, data: bytes) -> Any:
            self.count += 1
            return load_bytes(media_io, data)

        monkeypatch.setattr(ImageMediaIO, "load_bytes", counting)

        def refuse(_: ImageFile.ImageFile) -> None:
            raise AssertionError("pixels are decoded")

        self._forbid = lambda: monkeypatch.setattr(ImageFile.ImageFile, "load", refuse)

    def forbid(self) -> None:
        """From now on no file that Pillow has opened can be decoded, by whomever."""
        self._forbid()


@pytest.fixture
def decoding(monkeypatch: pytest.MonkeyPatch) -> Decoding:
    return Decoding(monkeypatch)


def picture(seed: int, kind: str = "PNG", mode: str = "RGB", **extra: Any) -> bytes:
    """An image file, another one for each seed."""
    pixels = np.random.default_rng(seed).integers(0, 256, (90, 120, 4), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels, "RGBA").convert(mode).save(out, kind, **extra)
    return out.getvalue()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
async def test_a_repeated_image_is_not_decoded(
    app: App, decoding: Decoding, kind: str
) -> None:
    data = picture(1, kind)
    first = await app.rendered(in_place(data))
    assert decoding.count == 1
    decoding.forbid()
    assert await app.rendered(in_place(data)) == first
    again = await app.rendered(in_place(data), in_place(data))
    assert again["mm_hashes"]["image"] == first["mm_hashes"]["image"] * 2


async def test_an_image_known_by_a_uuid_is_not_decoded(app: App, decoding: Decoding) -> None:
    await app.rendered(in_place(picture(2), uuid="two"))
    decoding.forbid()
    with_data = await app.rendered(in_place(picture(2), uuid="two"))
    alone = await app.rendered({"type": "image_url", "image_url": None, "uuid": "two"})
    assert alone == with_data


@pytest.mark.parametrize(
    "options",
    [{}, {"image_mode": None}, {"image_mode": "L"}, {"image_mode": "RGBA"},
     {"rgba_background_color": [0, 0, 0]}],
    ids=str,
)
@pytest.mark.parametrize(
    "kind, mode", [("JPEG", "RGB"), ("JPEG", "CMYK"), ("PNG", "RGBA"), ("PNG", "P"),
                   ("PNG", "LA"), ("WEBP", "RGBA"), ("GIF", "P")],
)
async def test_requests_are_what_vllms_own_connector_makes_of_them(
    app: App, monkeypatch: pytest.MonkeyPatch, kind: str, mode: str, options: dict[str, Any]
) -> None:
    fields = {"media_io_kwargs": {"image": options}} if options else {}
    part = in_place(picture(3, kind, mode))
    ours = await app.rendered(part, **fields)
    our_tensors = app.identities(ours)
    app.cache.clear_cache()
    monkeypatch.setenv("VLLM_MEDIA_CONNECTOR", "http")
    theirs = await app.rendered(part, **fields)
    assert ours == theirs
    assert our_tensors == app.identities(theirs)


async def test_many_who_show_one_image_have_it_decoded_once(
    app: App, decoding: Decoding
) -> None:
    data = picture(4, "JPEG")
    rendered = await asyncio.gather(*(app.rendered(in_place(data)) for _ in range(64)))
    assert decoding.count == 1
    assert all(each == rendered[0] for each in rendered)


async def test_an_image_by_url_is_the_image_itself(
    app: App, site: Site, decoding: Decoding
) -> None:
    data = picture(5)
    site.serve("/a.png", data, Cache_Control="max-age=60")
    in_the_request = await app.rendered(in_place(data))
    decoding.forbid()
    parts = [by_url(site.url("/a.png"))] * 8
    by_its_url = await asyncio.gather(*(app.rendered(part) for part in parts))
    assert by_its_url == [in_the_request] * 8
    assert await app.rendered(by_url(site.url("/a.png"))) == in_the_request
    assert site.asked["/a.png"] == 1


@pytest.mark.parametrize(
    "part",
    [
        in_place(picture(6, "JPEG")[:-500]),
        in_place(picture(6, "PNG")[:-5000]),
        in_place(picture(6, "WEBP")[:-500]),
        in_place(b""),
        in_place(b"text"),
        in_place(b"<svg xmlns='http://www.w3.org/2000/svg'/>"),
        by_url("data:image/png;base64"),
        by_url("data:image/png;base64,!!!"),
        by_url("data:image/png,text"),
        by_url("http://"),
        by_url("picture.png"),
        by_url("file:///etc/passwd"),
    ],
    ids=lambda part: part["image_url"]["url"][:40],
)
async def test_what_is_no_image_is_the_clients_error(app: App, part: dict[str, Any]) -> None:
    for _ in range(2):
        response = await app.chat(part)
        assert 400 <= response.status_code < 500, response.text
        message = response.json()["error"]["message"]
        assert len(message) < 300 and "Processor" not in message, message


async def test_too_many_pixels_are_the_clients_error(
    app: App, monkeypatch: pytest.MonkeyPatch, decoding: Decoding
) -> None:
    monkeypatch.setenv("VLLM_MAX_IMAGE_PIXELS", "1000")
    decoding.forbid()
    response = await app.chat(in_place(picture(7)))
    assert response.status_code == 400
    assert "maximum of 1000 pixels" in response.text


async def test_an_unknown_conversion_is_the_clients_error(app: App) -> None:
    for mode in ("FOO", 7):
        options = {"image": {"image_mode": mode}}
        response = await app.chat(in_place(picture(8)), media_io_kwargs=options)
        assert response.status_code == 400, response.text


async def test_vllms_blocking_calls_fetch_by_the_same_rules(site: Site) -> None:
    site.serve("/a.png", picture(9))
    for allowed in (True, False):
        policy = UrlPolicy([], allow_private=allowed)
        connector = LazyMediaConnector(
            remote=RemoteMedia(policy, UrlCache(0)), policy=policy
        )
        fetch = asyncio.to_thread(connector.fetch_image, site.url("/a.png"))
        if allowed:
            assert (await fetch).size == (120, 90)
        else:
            with pytest.raises(MediaUnavailable):
                await fetch
    assert site.asked["/a.png"] == 1


async def test_other_media_by_url_are_fetched_by_the_same_rules(site: Site) -> None:
    policy = UrlPolicy([], allow_private=False)
    connector = LazyMediaConnector(remote=RemoteMedia(policy, UrlCache(0)), policy=policy)
    for fetch in (connector.fetch_audio_async, connector.fetch_video_async):
        with pytest.raises(MediaUnavailable, match="not a public address"):
            await fetch(site.url("/a"))
    assert not site.requests


async def test_a_local_file_is_lazy_where_it_is_allowed(tmp_path: Path) -> None:
    policy = UrlPolicy([], allow_private=False)
    connector = LazyMediaConnector(
        remote=RemoteMedia(policy, UrlCache(0)), policy=policy,
        allowed_local_media_path=str(tmp_path),
    )
    (tmp_path / "a.png").write_bytes(picture(10))
    media: Any = await connector.fetch_image_async(f"file://{tmp_path}/a.png")
    assert not media.media.decoded and media.size == (120, 90)
    for path in (f"{tmp_path}/missing.png", f"{tmp_path}/../a.png", "/etc/passwd"):
        with pytest.raises((VLLMValidationError, ValueError)):
            await connector.fetch_image_async(f"file://{path}")


async def test_a_url_that_cannot_be_fetched_says_so(app: App, site: Site) -> None:
    response = await app.chat(by_url(site.url("/missing.png")))
    assert (response.status_code, "HTTP 404" in response.text) == (422, True)
    response = await app.chat(by_url("http://127.0.0.1:1/a.png"))
    assert (response.status_code, "127.0.0.1" in response.text) == (502, True)


@pytest.mark.parametrize("keep", [False, True])
async def test_pictures_are_noted_in_the_receipt_only_where_asked_for(keep: bool) -> None:
    policy = UrlPolicy([], allow_private=False)
    remote = RemoteMedia(policy, UrlCache(0))
    connector = LazyMediaConnector(remote=remote, policy=policy, keep_pictures=keep)
    receipt = Receipt()
    token = current_receipt.set(receipt)
    try:
        data = picture(77)
        await connector.fetch_image_async(in_place(data)["image_url"]["url"])
    finally:
        current_receipt.reset(token)
        await remote.close()
    assert receipt.pictures == ([data] if keep else [])


class SlowIO(MediaIO[str]):
    """Media that take a thread of their own for long."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def load_bytes(self, data: bytes) -> str:
        raise NotImplementedError

    def load_base64(self, media_type: str, data: str) -> str:
        assert self.go_on.wait(PATIENCE)
        return data

    def load_file(self, filepath: Path) -> str:
        raise NotImplementedError


async def test_others_have_their_turn_while_threads_decode_sounds_and_videos() -> None:
    policy = UrlPolicy([], allow_private=False)
    connector = LazyMediaConnector(remote=RemoteMedia(policy, UrlCache(0)), policy=policy)
    limits = AdmissionLimits(1 << 30, 10, 1 << 30, 60.0)
    admission = Admission(limits, Engine(), FleetLoad, CollectorRegistry())
    admission.large_bodies = LargeBodies(at_a_time=1, most_seconds=3600.0)
    with admission.body() as body:
        body.grow_to(LARGE_BYTES)
        await body.take_turn()
        await connector.fetch_image_async(in_place(picture(78))["image_url"]["url"])
        with pytest.raises(TimeoutError):  # a picture takes no time of its own
            await within(admission.large_bodies.turn(), 0.01)
        slow = SlowIO()
        loading = asyncio.create_task(
            connector.load_from_url_async("data:video/mp4;base64,abc", slow)
        )
        try:
            (await within(admission.large_bodies.turn())).end()
        finally:
            slow.go_on.set()
        assert await within(loading) == "abc"


@pytest.mark.parametrize(
    ("data", "here"),
    [
        (picture(1, "JPEG"), True),
        (picture(1, "PNG"), True),
        (picture(1, "GIF"), False),  # decoded at once
        (picture(1, "WEBP"), False),
        (picture(1, "JPEG") + bytes(AT_ONCE), False),
    ],
    ids=["JPEG", "PNG", "GIF", "WEBP", "large"],
)
async def test_only_what_takes_no_time_is_read_on_the_event_loop(
    app: App, data: bytes, here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    load_bytes = LazyImageIO.load_bytes

    def noting(media_io: LazyImageIO, data: bytes) -> Any:
        threads.append(threading.current_thread())
        return load_bytes(media_io, data)

    monkeypatch.setattr(LazyImageIO, "load_bytes", noting)
    await app.rendered(in_place(data))
    assert [thread is threading.main_thread() for thread in threads] == [here]
