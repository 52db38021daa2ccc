"""Workers that announce themselves in a directory, and who sees them."""

from __future__ import annotations

import subprocess
import sys
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest

from tests.fakes import make_facts, within
from transfer.errors import TransferError
from transfer.process import process_start_time, this_process
from transfer.registry import Registry, WorkerRecord, default_root


def record_of(name: str = "w", **changes: object) -> WorkerRecord:
    record = WorkerRecord(
        worker=name,
        address=f"ipc:///{name}",
        facts=make_facts(),
        **msgspec.structs.asdict(this_process()),
    )
    return msgspec.structs.replace(record, **changes)


def test_a_worker_is_found_as_it_announced_itself(registry: Registry) -> None:
    assert registry.records() == {}
    record = record_of()
    registry.announce(record)
    assert registry.records() == {"w": record}
    assert Registry(registry.path.parent, "test").records() == {"w": record}


def test_namespaces_do_not_see_each_other(registry: Registry) -> None:
    registry.announce(record_of())
    assert Registry(registry.path.parent, "other").records() == {}


def test_a_withdrawn_worker_leaves_nothing_behind(registry: Registry) -> None:
    registry.announce(record_of())
    (registry.socket_directory("w") / "requests").touch()
    registry.withdraw("w")
    registry.withdraw("w")
    assert list(registry.path.iterdir()) == []


def test_taking_a_worker_off_the_list_keeps_its_sockets(registry: Registry) -> None:
    registry.announce(record_of())
    sockets = registry.socket_directory("w")
    registry.withdraw_record("w")
    registry.withdraw_record("w")
    assert registry.records() == {}
    assert sockets.is_dir()


def test_what_a_dead_worker_left_is_swept_and_the_living_stay(registry: Registry) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        start_time = process_start_time(other.pid)
        assert start_time is not None
        registry.announce(record_of("dying", pid=other.pid, start_time=start_time))
        registry.announce(record_of("living"))
        registry.socket_directory("dying")
        assert set(registry.records()) == {"dying", "living"}
        other.kill()
    assert set(registry.records()) == {"living"}
    assert [path.name for path in registry.path.iterdir()] == ["living.json"]


def test_a_process_id_that_is_used_again_is_another_worker(registry: Registry) -> None:
    registry.announce(record_of(start_time=this_process().start_time - 1))
    assert registry.records() == {}


def test_a_worker_of_another_host_is_not_taken_for_dead(registry: Registry) -> None:
    away = record_of(host="elsewhere", pid=2**22 + 1, start_time=1)
    registry.announce(away)
    assert registry.records() == {"w": away}
    assert not away.is_local()


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"[1]", b"\xff\xfe", b'{"worker": 3}'])
def test_a_record_that_does_not_decode_counts_for_nothing(
    registry: Registry, content: bytes
) -> None:
    registry.announce(record_of())
    (registry.path / "broken.json").write_bytes(content)
    assert set(registry.records()) == {"w"}


def test_a_directory_open_to_others_is_refused(registry: Registry) -> None:
    registry.path.chmod(0o755)
    with pytest.raises(TransferError, match="mode 0700"):
        Registry(registry.path.parent, "test")


def test_directories_are_made_for_one_user(registry: Registry) -> None:
    assert registry.path.stat().st_mode & 0o777 == 0o700
    assert registry.socket_directory("w").stat().st_mode & 0o777 == 0o700


def test_a_path_too_long_for_sockets_is_refused_with_advice(registry: Registry) -> None:
    deep = Registry(registry.path / ("x" * 60), "n")
    with pytest.raises(TransferError, match="shorter --registry"):
        deep.socket_directory("w" * 20)


def test_without_a_registry_each_user_has_one(
    monkeypatch: pytest.MonkeyPatch, registry: Registry
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(registry.path))
    assert Registry(None, "n").path == registry.path / "foveal" / "n"
    # Sockets would not fit below a long one.
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/" + "x" * 50)
    assert default_root().name.startswith("foveal-")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert isinstance(default_root(), Path)


@pytest.mark.anyio
async def test_a_watcher_hears_of_arrivals_and_departures(registry: Registry) -> None:
    registry.announce(record_of("first"))
    async with aclosing(registry.watch()) as changes:
        assert set(await within(anext(changes))) == {"first"}
        registry.announce(record_of("second"))
        while set(await within(anext(changes))) != {"first", "second"}:
            pass
        registry.withdraw_record("first")
        while set(await within(anext(changes))) != {"second"}:
            pass


@pytest.mark.anyio
async def test_a_directory_that_is_not_there_is_looked_for_again(registry: Registry) -> None:
    registry.path.rmdir()
    async with aclosing(registry.watch()) as changes:
        assert await within(anext(changes)) == {}
        registry.path.mkdir(mode=0o700)
        registry.announce(record_of("first"))
        while set(await within(anext(changes))) != {"first"}:
            pass
        registry.announce(record_of("second"))
        while set(await within(anext(changes))) != {"first", "second"}:
            pass
