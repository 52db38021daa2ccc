"""Debian's etcd, started on free ports with a directory of its own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.etcd_server import EtcdServer, require_etcd


@pytest.fixture
def etcd() -> Iterator[EtcdServer]:
    require_etcd()
    directory = Path(tempfile.mkdtemp(prefix="fv-etcd-"))
    server = EtcdServer(directory)
    try:
        server.start()
        yield server
    finally:
        server.end()
        shutil.rmtree(directory, ignore_errors=True)
