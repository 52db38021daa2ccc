from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.frontend.app import App


@pytest.fixture(scope="module")
async def app() -> AsyncIterator[App]:
    """vLLM's app, one for all tests of a module. It takes seconds to start."""
    from tests.frontend.app import running_app  # loads vLLM, which most tests here do without

    async with running_app() as app:
        yield app
