"""Log lines for people, and as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs.logs import JSON_CONFIG, early_log_format, have_vllm_log_json

ROOT = Path(__file__).parents[2]
SPEAK = """
import logging, sys
from configs.logs import show_logs
show_logs("frontend", sys.argv[1])
logging.getLogger("frontend.x").info("a\\nb %d", 3, extra={"request_id": "r1"})
logging.getLogger("uvicorn.access").info("not ours to configure")
"""


def speak(log_format: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", SPEAK, log_format], cwd=ROOT, text=True, check=True,
        capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    return done.stderr.splitlines()


def test_text_is_in_the_shape_of_vllm() -> None:
    first, second = speak("text")
    assert first.startswith("(frontend pid=") and " INFO " in first
    assert first.endswith("[frontend.x] a") and second == "b 3"


def test_json_is_one_object_a_line_with_what_the_event_has() -> None:
    (line,) = speak("json")
    event = json.loads(line)
    assert event["message"] == "a\nb 3"
    assert (event["level"], event["logger"]) == ("INFO", "frontend.x")
    assert event["request_id"] == "r1"
    assert {"time", "pid"} <= set(event)


@pytest.mark.parametrize(
    "arguments, environ, expected",
    [
        ([], {}, "text"),
        (["--log-format", "json"], {}, "json"),
        (["--log-format=json"], {}, "json"),
        (["--log_format=json"], {}, "json"),
        (["--log-format"], {}, "text"),
        ([], {"FOVEAL_LOG_FORMAT": "json"}, "json"),
        (["--log-format", "text"], {"FOVEAL_LOG_FORMAT": "json"}, "text"),
    ],
)
def test_the_format_is_known_before_flags_are_parsed(
    arguments: list[str], environ: dict[str, str], expected: str
) -> None:
    assert early_log_format(arguments, environ) == expected


def test_vllm_is_told_unless_the_operator_has_told_it() -> None:
    environ: dict[str, str] = {}
    have_vllm_log_json(environ)
    assert environ["VLLM_LOGGING_CONFIG_PATH"] == str(JSON_CONFIG)
    environ = {"VLLM_LOGGING_CONFIG_PATH": "/own"}
    have_vllm_log_json(environ)
    assert environ["VLLM_LOGGING_CONFIG_PATH"] == "/own"
