"""Nothing here is specific to a model: families of every kind answer as in plain vLLM.

A few families by default; with ``-m matrix`` all of them, and what was found goes to a
file from which ``python -m tests.families.report`` makes the table in docs/models.md.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.fleet import ENGINE_ENV, ROOT
from tests.families.checkpoint import write_checkpoint
from tests.families.matrix import Answers, FamilyFleet, read_answers, tells_apart
from tests.families.questions import SEEDS, columns
from tests.families.report import RESULTS, note
from tests.families.table import FAMILIES, Family

pytestmark = pytest.mark.usefixtures("no_session_fleet")

CHECKPOINTS = ROOT / ".demo" / "families"
PLAIN_SECONDS = 900.0

OF_EVERY_RUN = ("qwen3-vl", "qwen2-audio", "qwen3-vl-moe")


def _of(family: Family) -> pytest.MarkDecorator | tuple[()]:
    return pytest.mark.matrix if family.name not in OF_EVERY_RUN else ()


@dataclass(frozen=True)
class Known:
    """A family, its checkpoint and plain vLLM's answers."""

    family: Family
    checkpoint: Path
    answers: Answers


@pytest.fixture(scope="module")
def plain_answers(
    request: pytest.FixtureRequest,
    no_session_fleet: None,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A directory with plain vLLM's answers for every family of this run."""
    wanted = {
        item.callspec.params["known"].name
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.path == Path(__file__)
        and hasattr(item, "callspec")
    }
    directory = tmp_path_factory.mktemp("answers")
    for name in wanted:
        write_checkpoint(FAMILIES[name], CHECKPOINTS)
    subprocess.run(
        [
            sys.executable, "-m", "tests.families.plain_vllm",
            str(CHECKPOINTS), str(directory), *(name for name in FAMILIES if name in wanted),
        ],
        env={**os.environ, **ENGINE_ENV}, cwd=ROOT, check=True, timeout=PLAIN_SECONDS,
        stdout=subprocess.DEVNULL,
    )
    return directory


@pytest.fixture(
    scope="module",
    params=[pytest.param(family, marks=_of(family), id=family.name)
            for family in FAMILIES.values()],
)
def known(request: pytest.FixtureRequest, plain_answers: Path) -> Known:
    family: Family = request.param
    answers = read_answers(plain_answers, family)
    if family.no_engine:
        assert family.no_engine in answers["error"]
        pytest.skip(f"vLLM's CPU build cannot run it, so NOT TESTED: {family.no_engine}")
    assert "error" not in answers, answers["error"]
    return Known(family, CHECKPOINTS / family.name, answers)


@pytest.fixture(scope="module")
def fleet(known: Known, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FamilyFleet]:
    running = FamilyFleet(known.family, known.checkpoint, tmp_path_factory.mktemp("logs"))
    yield running
    running.end()


def test_a_family_answers_as_in_plain_vllm_and_reuses_what_was_promised(
    known: Known, fleet: FamilyFleet, subtests: pytest.Subtests
) -> None:
    family = known.family
    for column in columns(family):
        for transfer in SEEDS:
            with subtests.test(column=column, transfer=transfer):
                cell = fleet.check(column, transfer, known.answers)
                note(RESULTS, cell)
                assert cell.faults == []
                if family.no_reuse:
                    assert cell.cached_tokens == 0
                else:
                    assert cell.cached_tokens > 0


def test_answers_depend_on_what_is_shown(known: Known) -> None:
    for modality in known.family.modalities:
        assert tells_apart(modality, known.answers)
