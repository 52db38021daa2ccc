"""One NIXL agent, without its progress thread: that one takes a core while it idles.

What follows from that, and from how NIXL 1.5 behaves over UCX:

- Nothing moves unless somebody calls. Over TCP, and for the first contact over anything,
  the side that is read from must call ``progress`` too.
- A READ cannot be called off. Releasing its handle, or dropping the peer, does not keep
  its bytes from arriving later: its target must stay untouched until ``poll`` says that
  it has ended. Handles are released only then.
- Metadata that is cut short spoils the peer's name for this agent for good. Names are
  made anew for every process, so that only that peer is affected.

``nixl`` is imported when an agent is made, so that hosts without it can run the rest.
"""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from transfer.errors import NixlUnavailable, ReadFailed

PROBE_SECONDS = 5.0


def address_of(memory: memoryview) -> int:
    """Return where writable ``memory`` starts. Good as long as the memory is."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Read:
    """A READ that was begun."""

    def __init__(self, agent: Any, handle: Any, state: str) -> None:
        self._agent = agent
        self._handle = handle
        self._state = state

    def poll(self) -> bool:
        """Drive it on; tells whether it has ended well.

        Raises:
            ReadFailed: it has ended, and not well.
        """
        if self._state == "PROC":
            try:
                self._state = self._agent.check_xfer_state(self._handle)
            except Exception as error:  # whatever NIXL raises, this is its end
                self._state = f"{type(error).__name__}: {error}"
        if self._state == "PROC":
            return False
        if self._handle is not None:
            with suppress(Exception):
                self._agent.release_xfer_handle(self._handle)
            self._handle = None
        if self._state != "DONE":
            raise ReadFailed(f"NIXL: {self._state}")
        return True


class NixlAgent:
    """Not safe to use from several threads at once.

    Raises:
        NixlUnavailable: NIXL is not installed, or a READ within this process fails.
    """

    def __init__(self, memory: memoryview, role: str) -> None:
        """Register ``memory``, all of it; it must be writable and stay mapped."""
        self.name = f"foveal-{role}-{os.getpid()}-{secrets.token_hex(8)}"
        self.address = address_of(memory)
        self._memory: memoryview | None = memory
        with _nixl_errors(NixlUnavailable):
            from nixl._api import nixl_agent, nixl_agent_config

            # It logs to standard output, whatever the application's logging.
            logging.getLogger("nixl").setLevel(logging.WARNING)
            settings = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self._agent = nixl_agent(self.name, settings)
            self._registered = self._agent.register_memory(
                [(self.address, memory.nbytes, 0, "")], "DRAM"
            )
            self.metadata = bytes(self._agent.get_agent_metadata())
        self._probe()

    def _probe(self) -> None:
        """Have the agent read from itself."""
        with _nixl_errors(NixlUnavailable):
            read = self.read(self.name, self.address, self.address, 1)
            deadline = time.monotonic() + PROBE_SECONDS
            while not read.poll():
                if time.monotonic() > deadline:
                    raise NixlUnavailable(f"no answer of its own in {PROBE_SECONDS:.0f} s")
                time.sleep(0.001)

    def add_peer(self, name: str, metadata: bytes) -> None:
        """Get to know another agent. Drop it first if it was known.

        Raises:
            ReadFailed: the metadata is not that agent's.
        """
        with _nixl_errors(ReadFailed):
            found = self._agent.add_remote_agent(metadata)
        stated = found.decode(errors="replace") if isinstance(found, bytes) else str(found)
        if stated != name:
            self.drop_peer(stated)
            raise ReadFailed(f"the metadata of agent {stated}, not {name}")

    def drop_peer(self, name: str) -> None:
        """Forget another agent. Let READs from it end before."""
        with suppress(Exception):  # it may be unknown, or its connection broken
            self._agent.remove_remote_agent(name)

    def read(self, peer: str, remote: int, local: int, nbytes: int) -> Read:
        """Begin to copy ``nbytes`` at ``remote``, an address there, to ``local`` here.

        Raises:
            ReadFailed: the peer is unknown or gone, or an address is not registered.
        """
        agent = self._agent
        with _nixl_errors(ReadFailed):
            handle = agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs([(local, nbytes, 0)], "DRAM"),
                agent.get_xfer_descs([(remote, nbytes, 0)], "DRAM"),
                peer,
            )
            return Read(agent, handle, agent.transfer(handle))

    def progress(self) -> None:
        """Serve what others read from here."""
        with suppress(Exception):  # a peer that has gone is its own business
            self._agent.get_new_notifs()

    def close(self) -> None:
        """Take the memory back. Peers see the connection end."""
        if self._memory is None:
            return
        with suppress(Exception):
            self._agent.deregister_memory(self._registered)
        del self._agent
        self._memory = None


@contextmanager
def _nixl_errors(kind: type[NixlUnavailable | ReadFailed]) -> Iterator[None]:
    """Raise whatever NIXL raises as ``kind``."""
    try:
        yield
    except (NixlUnavailable, ReadFailed) as error:
        raise error if isinstance(error, kind) else kind(str(error)) from error
    except Exception as error:
        raise kind(f"NIXL: {type(error).__name__}: {error}") from error
