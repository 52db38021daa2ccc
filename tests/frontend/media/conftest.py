from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.frontend.media.web import Site, running_site


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with running_site() as site:
        yield site
