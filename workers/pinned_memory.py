"""Memory that a GPU copies from by itself, while the host goes on.

Not exercised with a GPU by the tests. Where memory cannot be pinned, because the device or
the limit of locked memory does not allow it, copies are waited for and nothing else
changes.
"""

from __future__ import annotations

import logging
from contextlib import suppress

import torch

from transfer.nixl.agent import address_of

logger = logging.getLogger(__name__)

_pinned: set[int] = set()
"""Addresses: to unpin anything else is an error that CUDA remembers."""

PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process


def pin(memory: memoryview) -> bool:
    """Pin writable, shared ``memory``; tells whether it is."""
    if not torch.cuda.is_available():
        return False
    try:
        error = torch.cuda.cudart().cudaHostRegister(
            address_of(memory), memory.nbytes, PORTABLE
        )
        torch.cuda.check_error(error)
    except RuntimeError as error:
        logger.warning("%d bytes of shared memory stay unpinned: %s", memory.nbytes, error)
        _clear_last_error()
        return False
    _pinned.add(address_of(memory))
    return True


def unpin(memory: memoryview) -> None:
    """Undo ``pin``. Memory that was not pinned is left as it is."""
    if (address := address_of(memory)) in _pinned:
        _pinned.discard(address)
        torch.cuda.cudart().cudaHostUnregister(address)


def _clear_last_error() -> None:
    """Take back CUDA's last error, or else the next kernel's launch is taken to fail."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")
