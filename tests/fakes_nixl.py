"""What tests of NIXL share. Does not import vLLM, so that processes start at once."""

from __future__ import annotations

import hashlib
import os
import time

PATIENCE = 20.0


def identity_of(contents: bytes) -> bytes:
    return hashlib.blake2b(contents, digest_size=16).digest()


def cpu_seconds(during: float) -> float:
    """CPU time that this process, all threads, uses while this one sleeps."""
    before = os.times()
    time.sleep(during)
    after = os.times()
    return after.user + after.system - before.user - before.system
