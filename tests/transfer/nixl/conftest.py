from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes_nixl import PATIENCE
from tests.nixl_owner import Owner
from transfer.arena import Arena
from transfer.nixl.reader import ArenaReader


@pytest.fixture(scope="module", params=["tcp", "all"])
def transport(request: pytest.FixtureRequest) -> Iterator[str]:
    """What UCX may use: TCP as between hosts, or shared memory too."""
    name: str = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", name)
        yield name


@pytest.fixture(scope="module")
def owner(transport: str) -> Iterator[Owner]:
    """One process for all tests that leave it alive."""
    with Owner() as owner:
        owner.do("progress_for", "tests", 600.0)
        yield owner


@pytest.fixture
def doomed(transport: str) -> Iterator[Owner]:
    """One that a test may kill."""
    with Owner() as owner:
        owner.do("progress_for", "tests", 600.0)
        yield owner


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    with Arena(1 << 24, populate=False) as arena:
        yield arena


@pytest.fixture(scope="module")
def reader(arena: Arena, transport: str) -> Iterator[ArenaReader]:
    reader = ArenaReader(arena)
    reader.start().result(PATIENCE)
    yield reader
    reader.close()
