"""What an agent does where NIXL does not work."""

from __future__ import annotations

import sys

import pytest

from transfer.arena import Arena
from transfer.errors import NixlUnavailable
from transfer.nixl.agent import NixlAgent
from transfer.nixl.export import ArenaExport
from transfer.nixl.reader import ArenaReader

pytest.importorskip("nixl", reason="NIXL is not installed, so NOT TESTED")
pytestmark = pytest.mark.nixl


def test_every_agent_has_a_name_of_its_own() -> None:
    with Arena(1 << 16, populate=False) as arena:
        one, other = (NixlAgent(arena.memory(), "test") for _ in range(2))
        assert one.name != other.name
        one.close()
        one.close()
        other.close()


def test_without_nixl_it_says_so_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with Arena(1 << 16, populate=False) as arena:
        with pytest.raises(NixlUnavailable, match="nixl"):
            ArenaExport(arena)
        reader = ArenaReader(arena)
        with pytest.raises(NixlUnavailable, match="nixl"):
            reader.start().result(20)
        reader.close()
        assert arena.stats().bytes_used == 0


def test_a_transport_that_does_not_exist_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "carrier_pigeon")
    with Arena(1 << 16, populate=False) as arena, pytest.raises(NixlUnavailable):
        NixlAgent(arena.memory(), "test")
