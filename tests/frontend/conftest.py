"""What many of these tests use. vLLM is loaded for it, which others here do without."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest

from transfer.registry import Registry

if TYPE_CHECKING:
    from tests.frontend.app import App
    from tests.frontend.fleets import Fleet


@pytest.fixture
def elsewhere(registry: Registry) -> Registry:
    """Where no frontend looks for workers: they are known by address alone."""
    return Registry(registry.path.parent, "elsewhere")


@pytest.fixture
async def fleet(registry: Registry) -> AsyncIterator[Fleet]:
    from tests.frontend.fleets import Fleet

    async with Fleet(registry) as fleet:
        yield fleet


@pytest.fixture(scope="module")
async def app() -> AsyncIterator[App]:
    """vLLM's app, one for all tests of a module. It takes seconds to start."""
    from tests.frontend.app import running_app

    async with running_app() as app:
        yield app
