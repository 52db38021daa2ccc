"""Requests come out the same without the work that is spared."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.renderers.chat_utils import AsyncMultiModalItemTracker, BaseMultiModalItemTracker

from frontend.spared_work import one_processor_for_chats
from tests.frontend.app import APP_MARKS, CHECKPOINT, App, in_place, running_app

pytestmark = APP_MARKS


class Asked:
    """Counts how often the model's processor is asked about prompt updates."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, app: App) -> None:
        self.count = 0
        model = type(app.renderer.get_mm_processor())
        theirs = model._get_prompt_updates

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return theirs(*args, **kwargs)

        monkeypatch.setattr(model, "_get_prompt_updates", counted)


def png(width: int, height: int, shade: int) -> bytes:
    pixels = np.full((height, width, 3), shade, dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


async def test_a_seen_image_is_not_asked_about(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = in_place(png(80, 60, 1))
    first = await app.rendered(image)
    asked = Asked(monkeypatch, app)
    assert await app.rendered(image) == first
    assert asked.count == 0


async def test_seen_images_among_new_ones_come_out_as_all_new_do(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, new = in_place(png(100, 60, 2)), in_place(png(60, 140, 3))
    app.cache.clear_cache()
    expected = await app.rendered(seen, new, seen)
    identities = app.identities(expected)
    app.cache.clear_cache()
    await app.rendered(seen)
    asked = Asked(monkeypatch, app)
    assert await app.rendered(seen, new, seen) == expected
    assert app.identities(expected) == identities
    assert asked.count == 1
    # And with nothing new, in another order.
    other = await app.rendered(new, seen)
    assert other["mm_hashes"]["image"] == expected["mm_hashes"]["image"][1:]
    assert asked.count == 1


async def test_options_are_looked_at_where_nothing_is_lacking(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, options = in_place(png(80, 60, 4)), {"do_convert_rgb": True}
    first = await app.rendered(image, mm_processor_kwargs=options)
    asked = Asked(monkeypatch, app)
    assert await app.rendered(image, mm_processor_kwargs=options) == first
    assert asked.count == 1


async def test_chats_share_a_processor_of_the_model(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BaseMultiModalItemTracker, "mm_processor", one_processor_for_chats())
    made = []
    create = type(MULTIMODAL_REGISTRY).create_processor

    def noted(registry: Any, config: Any, **kwargs: Any) -> Any:
        made.append(config)
        return create(registry, config, **kwargs)

    monkeypatch.setattr(type(MULTIMODAL_REGISTRY), "create_processor", noted)
    config = app.renderer.model_config
    first, second = (AsyncMultiModalItemTracker(config).mm_processor for _ in range(2))
    assert first is second
    assert type(first) is type(app.renderer.get_mm_processor())
    assert made == [config]


async def test_a_chat_may_still_hold_no_more_images_than_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(BaseMultiModalItemTracker, "mm_processor", one_processor_for_chats())
    limits = ("--limit-mm-per-prompt", '{"image": 2}')
    async with running_app(CHECKPOINT, *limits) as app:
        image = in_place(png(80, 60, 5))
        for _ in range(2):
            assert (await app.render(image, image)).status_code == 200
            refused = await app.render(image, image, image)
            assert refused.status_code == 400
            assert "At most 2 image(s)" in refused.text

