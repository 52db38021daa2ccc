"""Engines are started so that they do not outlive their worker."""

from __future__ import annotations

import pytest
from vllm.v1.engine.core import EngineCoreProc

from workers import process_death
from workers.process_death import engines_die_with_us


def test_engines_are_started_by_our_function_only_where_asked() -> None:
    before = EngineCoreProc.run_engine_core
    with engines_die_with_us():
        assert EngineCoreProc.run_engine_core is process_death.run_engine_core
    assert EngineCoreProc.run_engine_core is before
    with pytest.raises(RuntimeError, match="no start"), engines_die_with_us():
        raise RuntimeError("no start")
    assert EngineCoreProc.run_engine_core is before
