"""Memory that a GPU copies from by itself, while the host goes on.

Not exercised with a GPU by the tests. Where memory cannot be pinned, because the device or
the limit of locked memory does not allow it, copies are waited for and nothing else
changes.
"""

from __future__ import annotations

import logging

import torch

from transfer.nixl.agent import address_of

logger = logging.getLogger(__name__)

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
        return False
    return True


def unpin(memory: memoryview) -> None:
    """Undo ``pin``. Memory that was not pinned is left as it is."""
    if torch.cuda.is_available():
        torch.cuda.cudart().cudaHostUnregister(address_of(memory))
