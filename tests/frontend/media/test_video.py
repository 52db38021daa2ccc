"""Videos, through vLLM's own app and renderer: how they are told apart and bounded."""

from __future__ import annotations

import base64
import io
from typing import Any

import pytest
from PIL import Image

from frontend.arena_cache import IdentifiedItem
from frontend.media.connector import CONNECTOR
from tests.e2e.pictures import encoded, pattern
from tests.families.media import by_url, film, in_place
from tests.frontend.app import APP_MARKS, App
from tests.frontend.media.web import Site
from transfer.pack import is_packed

pytestmark = APP_MARKS


@pytest.fixture(autouse=True)
def our_connector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MEDIA_CONNECTOR", CONNECTOR)


def filmed(seed: int, frames: int = 16) -> dict[str, Any]:
    return in_place("video", "mp4", film(frames, seed))


def pictured() -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(encoded(pattern(120, 90, 1))).decode()}"
    return by_url("image", url)


async def hashes(app: App, *parts: dict[str, Any], **fields: Any) -> dict[str, list[str]]:
    found: dict[str, list[str]] = (await app.rendered(*parts, **fields))["mm_hashes"]
    return found


async def test_a_video_goes_into_the_arena_whole(app: App) -> None:
    [mm_hash] = (await hashes(app, filmed(1)))["video"]
    item, _ = app.cache.get_and_update_item(None, mm_hash)
    assert isinstance(item, IdentifiedItem) and is_packed(item)
    assert item["pixel_values_videos"].data is None


async def test_a_video_by_address_is_the_same_as_in_place(app: App, site: Site) -> None:
    site.serve("/a.mp4", film(16, 2))
    by_address = await hashes(app, by_url("video", site.url("/a.mp4")))
    assert by_address == await hashes(app, filmed(2))
    assert site.asked["/a.mp4"] == 1


async def test_another_video_is_another(app: App) -> None:
    assert await hashes(app, filmed(1)) != await hashes(app, filmed(2))


@pytest.mark.parametrize("options", [{"num_frames": 6}, {"fps": 2, "num_frames": -1}])
async def test_how_frames_are_chosen_is_part_of_a_video(
    app: App, options: dict[str, Any]
) -> None:
    plain = await hashes(app, filmed(3))
    chosen = await hashes(app, filmed(3), media_io_kwargs={"video": options})
    again = await hashes(app, filmed(3), media_io_kwargs={"video": options})
    assert plain != chosen == again


async def test_options_belong_to_their_own_modality(app: App) -> None:
    plain = await hashes(app, pictured(), filmed(5))
    of_video = await hashes(
        app, pictured(), filmed(5), media_io_kwargs={"video": {"num_frames": 6}}
    )
    of_image = await hashes(
        app, pictured(), filmed(5),
        media_io_kwargs={"image": {"rgba_background_color": [0, 0, 0]}},
    )
    processed = await hashes(
        app, pictured(), filmed(5), mm_processor_kwargs={"videos_kwargs": {"fps": 1}}
    )
    assert of_video["image"] == plain["image"] and of_video["video"] != plain["video"]
    assert of_image["video"] == plain["video"] and of_image["image"] != plain["image"]
    assert processed["image"] == plain["image"] and processed["video"] != plain["video"]


async def test_frames_that_show_their_background_differ_by_its_colour(app: App) -> None:
    seen = []
    for colour in ([255, 255, 255], [0, 0, 0]):
        options = {"image": {"rgba_background_color": colour}}
        rendered = await app.rendered(see_through_frames(), media_io_kwargs=options)
        [mm_hash] = rendered["mm_hashes"]["video"]
        item, _ = app.cache.get_and_update_item(None, mm_hash)
        assert isinstance(item, IdentifiedItem)
        seen.append((mm_hash, item.identity))
    (white, of_white), (black, of_black) = seen
    assert white != black and of_white != of_black


def see_through_frames() -> dict[str, Any]:
    """A video of single pictures, with transparency."""
    frame = Image.new("RGBA", (84, 56), (200, 30, 30, 90))
    with io.BytesIO() as buffer:
        frame.save(buffer, "PNG")
        data = base64.b64encode(buffer.getvalue()).decode()
    return by_url("video", f"data:video/jpeg;base64,{data},{data}")


@pytest.mark.parametrize(
    "url",
    [
        "data:video/mp4;base64,AAAA",
        "data:video/mp4;base64,????",
        "data:video/mp4,AAAA",
        "data:video/mp4",
        "data:video/jpeg;base64,AAAA,AAAA",
        "data:video/mp4;base64," + base64.b64encode(film(16, 6)[:600]).decode(),
    ],
)
async def test_what_is_no_video_is_the_clients_fault(app: App, url: str) -> None:
    response = await app.render(by_url("video", url))
    assert response.status_code == 400, response.text


async def test_a_video_may_be_as_large_as_a_download(
    app: App, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB", "1")
    large = film(64, 7, (320, 240))
    assert len(large) > 2**20
    site.serve("/large.mp4", large)
    for part in (by_url("video", site.url("/large.mp4")), in_place("video", "mp4", large)):
        response = await app.render(part)
        assert response.status_code == 422, response.text


async def test_frames_may_have_as_many_pixels_as_a_picture(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_MAX_IMAGE_PIXELS", "5000")
    response = await app.render(filmed(8))
    assert response.status_code == 400
    assert "9408 pixels" in response.text
