"""Installs the peer where it is missing, and asks it to measure itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import IO

from benchmarks.metrics import CannotMeasure

ROOT = Path(__file__).parents[2]
HOME = ROOT / ".bench" / "radix"
PACKAGE = "ai-dynamo-runtime==1.6.1"
SECONDS_TO_INSTALL = 120


def installed() -> Path:
    """Return a Python that has the peer.

    Raises:
        CannotMeasure: it cannot be installed here.
    """
    python = HOME / "bin" / "python"
    if (HOME / ".installed").exists():
        return python
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if uv is None:
        raise CannotMeasure(f"uv is needed to install {PACKAGE}")
    try:
        for command in (
            [uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(HOME)],
            [uv, "pip", "install", "--quiet", "--python", str(python), PACKAGE],
        ):
            subprocess.run(
                command, check=True, capture_output=True, timeout=SECONDS_TO_INSTALL
            )
    except subprocess.CalledProcessError as error:
        reason = error.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise CannotMeasure(f"{PACKAGE} cannot be installed: {reason}") from error
    except subprocess.TimeoutExpired as error:
        raise CannotMeasure(f"{PACKAGE} is not installed in time") from error
    (HOME / ".installed").touch()
    return python


class RadixPeer:
    """The process of ``radix_peer.py``; leaving the context ends it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [str(installed()), "-m", "benchmarks.router.radix_peer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )

    def __enter__(self) -> RadixPeer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def ask(self, verb: str, *numbers: int) -> float:
        """Have it do one thing and return the figure.

        Raises:
            CannotMeasure: it has ended.
        """
        commands, answers = _pipes(self._process)
        try:
            commands.write(json.dumps([verb, *numbers]) + "\n")
            commands.flush()
            answer = answers.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise CannotMeasure(f"the peer ended with status {self._process.wait()}")
        return float(json.loads(answer))


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    if process.stdin is None or process.stdout is None:
        raise ValueError("the peer was started without pipes")
    return process.stdin, process.stdout
