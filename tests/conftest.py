from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from transfer.registry import Registry

# A busy machine is no failure.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """For the whole session: an async fixture can live no longer than this one."""
    return "asyncio"


@pytest.fixture(scope="module")
def over_tcp() -> Iterator[None]:
    """NIXL agents reach each other as they do between hosts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp")
        yield


@pytest.fixture
def registry() -> Iterator[Registry]:
    """A registry of its own, on a path short enough for Unix sockets."""
    root = Path(tempfile.mkdtemp(prefix="fv-", dir="/tmp"))
    yield Registry(root, "test")
    shutil.rmtree(root)
