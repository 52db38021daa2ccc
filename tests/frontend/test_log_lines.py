"""The line that is logged for each engine request."""

from __future__ import annotations

import logging

import pytest

from frontend.log_lines import log_routed
from frontend.receipt import Routed


def test_the_line_has_the_id_of_the_receipt(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    routed = Routed("w1", 3, 5, "shm", request_id="chatcmpl-1\n2")
    monkeypatch.setattr(logging.getLogger("frontend"), "propagate", True)
    with caplog.at_level(logging.INFO, "frontend.log_lines"):
        log_routed(routed)
    (record,) = caplog.records
    assert record.getMessage() == (
        "request chatcmpl-1?2 to w1: 3 of 5 blocks there, tensors shm"
    )
    assert vars(record)["request_id"] == routed.plain_id
    assert vars(record)["overlap_blocks"] == 3
