"""Two hosts on this machine: network namespaces, each with a /dev/shm of its own.

They share the filesystem and nothing else that programs here make use of. Each lasts as
long as one sleeping process, and leaves nothing behind.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType

from tests.e2e.fleet import ROOT
from tests.e2e.processes import Process, wait_until

SET_UP = (
    "mount -t tmpfs tmpfs /dev/shm && mount -t sysfs sysfs /sys && ip link set lo up "
    "&& exec sleep infinity"
)
"""Programs look for network devices in /sys, which shows those of where it was mounted."""
TOOLS = ("unshare", "nsenter", "mount", "ip")


class NotAllowed(Exception):
    """This user, or this machine, does not allow namespaces."""


class Host:
    """One of the two."""

    def __init__(self, logs: Path, number: int) -> None:
        self.address = f"10.90.0.{number}"
        self._holder = Process(
            ["unshare", "--net", "--mount", "sh", "-c", SET_UP],
            logs / f"host-{number}.log",
            os.environ,
            logs,
        )
        self.pid = self._holder.pid
        self.inside = (
            "nsenter", "-t", str(self.pid), "--net", "--mount", f"--wd={ROOT}"
        )
        """What runs a command on this host."""
        wait_until(self._is_up, 10.0, f"host {number}")

    def run(self, *command: str) -> None:
        """Run a command on this host.

        Raises:
            NotAllowed: it fails.
        """
        done = subprocess.run(
            [*self.inside, *command], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise NotAllowed(f"{' '.join(command)}: {done.stderr.strip()}")

    def end(self) -> None:
        self._holder.end()

    def _is_up(self) -> bool:
        if self._holder.exit_status is not None:
            raise NotAllowed(self._holder.last_lines(1))
        comm = Path(f"/proc/{self.pid}/comm").read_text().strip()
        return comm == "sleep"


class TwoHosts:
    """A context: two hosts that reach each other over TCP.

    Raises:
        NotAllowed: not here; the text says why.
    """

    def __init__(self, logs: Path) -> None:
        if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
            raise NotAllowed(f"{', '.join(missing)} not found")
        self.one = Host(logs, 1)
        try:
            self.other = Host(logs, 2)
        except BaseException:
            self.one.end()
            raise
        try:
            self.one.run(
                "ip", "link", "add", "line", "type", "veth",
                "peer", "name", "line", "netns", str(self.other.pid),
            )
            for host in (self.one, self.other):
                host.run("ip", "address", "add", f"{host.address}/24", "dev", "line")
                host.run("ip", "link", "set", "line", "up")
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        self.one.end()
        self.other.end()

    def __enter__(self) -> TwoHosts:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()
