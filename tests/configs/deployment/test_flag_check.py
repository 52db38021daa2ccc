"""What those who define flags say of them, and which key of the file gets the blame."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from configs.deployment import flag_check
from configs.deployment.reading import read_deployment

REFUSES = """
import sys
known = {"--model", "--namespace", "--registry", "--good"}
if "--max-num-seqs" in sys.argv:
    sys.exit("usage: ...\\npython -m workers: error: argument --max-num-seqs: invalid int "
             "value: 'x'")
bad = [a for a in sys.argv[1:] if a.startswith("--") and a not in known
       and not a.startswith(("--http", "--mm", "--frontends"))]
if bad:
    sys.exit("python -m frontend: error: unrecognized arguments: " + " 1 ".join(bad))
"""
TEXT = """\
model: m
engine:
  shared: 1
frontend:
  options:
    good: 1
    bad-one: 1
    bad-two: false
workers:
  - options: {good: true}
  - count: 5
    options:
      max-num-seqs: x
"""


def test_each_complaint_has_the_line_of_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FRONTEND_CHECK", "WORKER_CHECK"):
        monkeypatch.setattr(flag_check, name, [sys.executable, "-c", REFUSES])
    path = tmp_path / "d.yaml"
    path.write_text(TEXT)
    assert flag_check.check_flags(read_deployment(path)) == [
        f"{path}:3: engine.shared: there is no flag --shared",
        f"{path}:7: frontend.options.bad-one: there is no flag --bad-one",
        f"{path}:8: frontend.options.bad-two: there is no flag --no-bad-two",
        f"{path}:13: workers.1.options.max-num-seqs: argument --max-num-seqs: invalid int "
        "value: 'x'",
    ]


def test_who_is_content_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FRONTEND_CHECK", "WORKER_CHECK"):
        monkeypatch.setattr(flag_check, name, [sys.executable, "-c", "print('a log line')"])
    path = tmp_path / "d.yaml"
    path.write_text(TEXT)
    assert flag_check.check_flags(read_deployment(path)) == []
