"""What clients send by mistake or on purpose, through vLLM's own app.

No worker is there: whatever gets past the frontend is answered 503, so a 4xx shows that
no worker would have been bothered.
"""

from __future__ import annotations

import asyncio
import gc
import io
import resource
import struct
import zlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pybase64
import pytest
import torch
from PIL import Image
from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import encode_mm_kwargs_item
from vllm.multimodal.inputs import MultiModalKwargsItem

from frontend.media.connector import CONNECTOR
from tests.fakes import make_item
from tests.frontend.app import APP_MARKS, CHECKPOINT, App, by_url, in_place, running_app
from transfer.pack import is_packed

pytestmark = [
    *APP_MARKS,
    # vLLM's, about what it decodes from a request's JSON.
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),
]

CHAT = "/v1/chat/completions"
GENERATE = "/inference/v1/generate"
PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(scope="module")
async def running() -> AsyncIterator[App]:
    async with running_app(CHECKPOINT, "--limit-mm-per-prompt", '{"image": 3}') as app:
        yield app


@pytest.fixture
def app(running: App, monkeypatch: pytest.MonkeyPatch) -> Iterator[App]:
    """In place of the app of most modules. Every test leaves nothing in use."""
    monkeypatch.setenv("VLLM_MEDIA_CONNECTOR", CONNECTOR)
    yield running
    gc.collect()
    running.cache.clear_cache()
    stats = running.arena.stats()
    assert (stats.leased_entries, stats.bytes_used) == (0, 0)
    assert running.llm.get_num_unfinished_requests() == 0


def picture(size: tuple[int, int] = (60, 40), colour: int = 0x336699) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, colour).save(out, "PNG")
    return out.getvalue()


def png(width: int, height: int, content: bytes = b"") -> bytes:
    """A one-bit PNG that claims a size, whatever ``content`` holds."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)

    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(content))
        + chunk(b"IEND", b"")
    )


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def refused(response: httpx.Response, *reasons: str) -> None:
    """Check that the client was told what is wrong with what it sent."""
    assert 400 <= response.status_code < 500, response.text
    message = response.json()["error"]["message"]
    assert any(reason.lower() in message.lower() for reason in reasons), message
    assert "Traceback" not in message and len(message) < 2000


NO_IMAGES = {
    "empty": b"",
    "text": b"text as PNG",
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "html": b"<html><body>404</body></html>",
    "pdf": b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n",
    "zip": b"PK\x03\x04" + bytes(60),
    "heic": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100),
    "gzip": b"\x1f\x8b\x08" + bytes(40),
    "png_signature_only": b"\x89PNG\r\n\x1a\n",
    "png_broken_after_its_header": png(8, 8)[:40],
    "png_without_pixels": png(8, 8),
    "png_of_no_width": png(0, 8),
    "png_of_no_height": png(8, 0),
    "jpeg_marker_only": b"\xff\xd8\xff\xe0",
    "gif_of_no_size": b"GIF89a" + bytes(7) + b";",
    "bmp_of_no_size": b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, 0, 0, 1,
                                          24, 0, 0, 0, 0, 0, 0),
}


@pytest.mark.parametrize("name", NO_IMAGES)
async def test_what_is_no_image_is_refused(app: App, name: str) -> None:
    refused(await app.chat(in_place(NO_IMAGES[name])), "image")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "TIFF"])
async def test_a_truncated_image_is_refused(app: App, kind: str) -> None:
    out = io.BytesIO()
    noise = Image.effect_noise((200, 150), 90).convert("RGB")
    noise.save(out, kind)
    whole = out.getvalue()
    for cut in (len(whole) // 2, len(whole) // 4):
        refused(await app.chat(in_place(whole[:cut])), "Failed to load image")


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64", "data:image/png;base64,!!!", "data:image/png;base64,AAA",
        "data:,", "data:", "", "picture.png", "javascript:alert(1)", "ftp://host/a.png",
        "file:///etc/passwd", "http://", "http://[::1", "//host/a.png", "\0",
    ],
)
async def test_what_is_no_address_of_an_image_is_refused(app: App, url: str) -> None:
    response = await app.chat(by_url(url))
    assert 400 <= response.status_code < 500, response.text
    assert "passwd" not in response.text.replace("file:///etc/passwd", "")


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": 7},
        {"type": "image_url", "image_url": {"url": 7}},
        {"type": "image_url", "image_url": {"url": None}},
        {"type": "image_url", "image_url": ["a"]},
        {"type": "image_url"},
        {"type": "no_such_type", "no_such_type": "a"},
        {"type": None},
        {},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}, "uuid": 7},
        {"type": "image_pil", "image_pil": "a"},
        {"type": "image_embeds", "image_embeds": "gASVAAAA"},
    ],
    ids=str,
)
async def test_parts_of_wrong_types_are_refused(app: App, part: dict[str, Any]) -> None:
    response = await app.chat(part)
    assert 400 <= response.status_code < 500, response.text


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000])
async def test_bodies_that_are_no_request_are_refused(app: App, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    response = await app.http.post(CHAT, content=content, headers=headers)
    assert 400 <= response.status_code < 500, response.text


async def test_bombs_are_refused_without_being_unpacked(app: App) -> None:
    """20,000 x 20,000 pixels in a few KB, many at once."""
    bomb = png(20_000, 20_000, bytes(2501 * 20_000))
    assert len(bomb) < 100_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    responses = await asyncio.gather(*(app.chat(in_place(bomb)) for _ in range(16)))
    for response in responses:
        refused(response, "exceed")
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 100_000, "one of them takes 400 MB in 8 bits"


async def test_an_image_narrower_than_the_model_takes_is_refused(app: App) -> None:
    refused(await app.chat(in_place(picture((3000, 4)))), "aspect ratio")
    refused(await app.chat(in_place(picture((4, 3000)))), "aspect ratio")


async def test_too_many_images_are_refused(app: App) -> None:
    parts = [in_place(picture(colour=number)) for number in range(4)]
    refused(await app.chat(*parts), "at most 3 image")
    rendered = await app.rendered(*parts[:3])
    assert len(rendered["mm_hashes"]["image"]) == 3


async def test_more_placeholders_than_images_are_refused(app: App) -> None:
    for parts in (
        (text(PLACEHOLDER), in_place(picture())),
        (in_place(picture()), text(f"and {PLACEHOLDER}?")),
        (in_place(picture()), text("<|image_pad|>")),
    ):
        refused(await app.chat(*parts), "more images than the 1")


async def test_a_placeholder_in_a_text_shows_no_image(app: App) -> None:
    """Without images it is text of the user's; nobody's image appears."""
    response = await app.render(text(f"What is {PLACEHOLDER}?"))
    if response.status_code == 200:
        assert not (response.json()["features"] or {}).get("mm_hashes")
    else:
        assert 400 <= response.status_code < 500, response.text


async def test_text_and_images_keep_their_order(app: App) -> None:
    first, second = in_place(picture(colour=1)), in_place(picture(colour=2))
    one = await app.rendered(text("a"), first, text("b"), second)
    other = await app.rendered(text("a"), second, text("b"), first)
    assert one["mm_hashes"]["image"] == other["mm_hashes"]["image"][::-1]
    assert one["token_ids"] == other["token_ids"]
    offsets = [place["offset"] for place in one["mm_placeholders"]["image"]]
    assert offsets == sorted(offsets) and offsets[0] > 0
    assert offsets[1] > offsets[0] + one["mm_placeholders"]["image"][0]["length"]


async def test_an_image_beyond_the_encoders_budget_is_refused(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app.llm.input_processor, "mm_encoder_cache_size", 10)
    refused(await app.chat(in_place(picture((600, 400)))), "encoder cache", "pre-allocated")


async def test_images_beyond_the_context_are_refused(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app.llm.model_config, "max_model_len", 64)
    refused(await app.chat(in_place(picture((600, 400)))), "maximum context length", "longer")


async def test_a_uuid_that_is_a_pictures_hash_does_not_answer_for_it(app: App) -> None:
    """Whoever knows a picture's hash cannot have others shown another picture."""
    theirs, poison = picture(colour=0xFF0000), picture(colour=0x00FF00)
    [their_hash] = (await app.rendered(in_place(theirs)))["mm_hashes"]["image"]
    [expected] = app.identities(await app.rendered(in_place(theirs)))
    app.cache.clear_cache()
    for uuid in (their_hash, f"uuid:{their_hash}"):
        rendered = await app.rendered(in_place(poison, uuid=uuid))
        assert rendered["mm_hashes"]["image"] != [their_hash]
        assert app.identities(rendered) != [expected]
    assert app.identities(await app.rendered(in_place(theirs))) == [expected]


async def generate(app: App, item: MultiModalKwargsItem, mm_hash: str) -> httpx.Response:
    """What a client sends who has processed an image itself."""
    return await app.http.post(
        GENERATE,
        json={
            "token_ids": [1, 2, 3, 4, 5],
            "features": {
                "mm_hashes": {"image": [mm_hash]},
                "mm_placeholders": {"image": [{"offset": 1, "length": 2}]},
                "kwargs_data": {"image": [encode_mm_kwargs_item(item)]},
            },
            "sampling_params": {"max_tokens": 1},
        },
    )


async def test_a_reference_from_a_client_is_refused(app: App) -> None:
    rendered = await app.rendered(in_place(picture((300, 200))))
    [mm_hash] = rendered["mm_hashes"]["image"]
    ours, _ = app.cache.get_and_update_item(None, mm_hash)
    assert ours is not None and is_packed(ours)
    stolen = MultiModalKwargsItem(dict(ours))
    for name in (mm_hash, "another"):
        refused(await generate(app, stolen, name), "must hold data, not references")


async def test_an_item_from_a_client_does_not_answer_for_a_pictures_hash(app: App) -> None:
    theirs = picture((300, 200), 0xFF0000)
    first = await app.rendered(in_place(theirs))
    [expected], [mm_hash] = app.identities(first), first["mm_hashes"]["image"]
    app.cache.clear_cache()
    response = await generate(app, make_item(torch.rand(8, 100)), mm_hash)
    assert response.status_code == 503, response.text  # it would have gone to a worker
    assert app.identities(await app.rendered(in_place(theirs))) == [expected]


async def test_options_of_videos_leave_images_what_they_are(app: App) -> None:
    image = in_place(picture())
    plain = await app.rendered(image)
    video = await app.rendered(image, media_io_kwargs={"video": {"num_frames": 4}})
    assert video["mm_hashes"] == plain["mm_hashes"]
    other = await app.rendered(image, media_io_kwargs={"image": {"image_mode": "L"}})
    assert other["mm_hashes"] != plain["mm_hashes"]


async def test_options_of_the_processor_make_another_image(app: App) -> None:
    image = in_place(picture((600, 400)))
    sizes = []
    for pixels in (50_176, 200_704):
        options = {"size": {"shortest_edge": 3136, "longest_edge": pixels}}
        rendered = await app.rendered(image, mm_processor_kwargs=options)
        sizes.append((rendered["mm_hashes"]["image"], len(rendered["token_ids"])))
    (one, fewer), (other, more) = sizes
    assert one != other and fewer < more


async def test_base64_of_a_picture_may_be_of_any_length(app: App) -> None:
    """Padding and line length are what encoders disagree about."""
    data = picture()
    plain = await app.rendered(in_place(data))
    for tail in (b"", b"\0", b"\0\0"):
        url = "data:image/png;base64," + pybase64.b64encode(data + tail).decode()
        rendered = await app.rendered(by_url(url))
        assert rendered["token_ids"] == plain["token_ids"]
