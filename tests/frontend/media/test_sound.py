"""Sounds are decoded by vLLM, after the checks that all media go through."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from vllm.exceptions import VLLMValidationError

from frontend.media.connector import LazyMediaConnector
from frontend.media.remote_media import RemoteMedia
from frontend.media.url_cache import UrlCache
from frontend.media.url_policy import UrlPolicy
from tests.families.media import SAMPLES_PER_SECOND, sound
from tests.frontend.media.web import Site

pytestmark = pytest.mark.anyio

IN_PLACE = "data:audio/wav;base64,"


@pytest.fixture
async def connector() -> AsyncIterator[LazyMediaConnector]:
    policy = UrlPolicy([], allow_private=True)
    remote = RemoteMedia(policy, UrlCache(1 << 20))
    yield LazyMediaConnector(remote=remote, policy=policy)
    await remote.close()


def encoded(data: bytes) -> str:
    return IN_PLACE + base64.b64encode(data).decode()


async def test_a_sound_by_address_is_the_same_as_in_place(
    connector: LazyMediaConnector, site: Site
) -> None:
    pytest.importorskip("soundfile")
    site.serve("/a.wav", sound(0.5))
    samples, rate = await connector.fetch_audio_async(site.url("/a.wav"))
    same, same_rate = await connector.fetch_audio_async(encoded(sound(0.5)))
    assert rate == same_rate == SAMPLES_PER_SECOND
    assert len(samples) == SAMPLES_PER_SECOND // 2
    np.testing.assert_array_equal(samples, same)


async def test_a_sound_may_be_as_large_as_vllm_allows(
    connector: LazyMediaConnector, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_MAX_AUDIO_CLIP_FILESIZE_MB", "1")
    large: Any = sound(40.0)
    assert len(large) > 2**20
    site.serve("/large.wav", large)
    for url in (site.url("/large.wav"), encoded(large)):
        with pytest.raises(VLLMValidationError, match="Maximum file size exceeded"):
            await connector.fetch_audio_async(url)


@pytest.mark.parametrize("url", ["data:audio/wav", "data:audio/wav,AAAA"])
async def test_what_is_no_data_url_is_the_clients_fault(
    connector: LazyMediaConnector, url: str
) -> None:
    with pytest.raises(VLLMValidationError):
        await connector.fetch_audio_async(url)
