"""How long a deployment's shared outputs stay."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from transfer.embeddings.home import ALIVE, PREFIX, EmbeddingHome, sweep_dead_homes
from transfer.errors import ArenaGone

SECRET = bytes(range(32))


def test_the_last_one_removes_all(tmp_path: Path):
    first, second = (EmbeddingHome(SECRET, "ns", tmp_path) for _ in range(2))
    assert first.path == second.path
    (first.path / "model").mkdir()
    (first.path / "model" / "output").write_bytes(b"x")
    assert not first.leave()
    assert (second.path / "model" / "output").exists()
    assert second.leave()
    assert list(tmp_path.iterdir()) == []
    assert not second.leave()


def test_deployments_and_namespaces_do_not_meet(tmp_path: Path):
    homes = [
        EmbeddingHome(secret, namespace, tmp_path)
        for secret in (SECRET, bytes(32))
        for namespace in ("a", "b")
    ]
    assert len({home.path for home in homes}) == 4


def test_it_is_for_this_user_only(tmp_path: Path):
    home = EmbeddingHome(SECRET, "ns", tmp_path)
    assert stat.S_IMODE(home.path.stat().st_mode) == 0o700
    assert stat.S_IMODE((home.path / ALIVE).stat().st_mode) == 0o600
    home.leave()
    home.path.mkdir(mode=0o755)
    with pytest.raises(ArenaGone, match="mode 0700"):
        EmbeddingHome(SECRET, "ns", tmp_path)


def test_it_outlives_a_process_that_is_killed_while_another_lives(tmp_path: Path):
    home = EmbeddingHome(SECRET, "ns", tmp_path)
    _killed_inside(tmp_path)
    assert sweep_dead_homes(tmp_path) == []
    assert (home.path / "model").exists()
    home.leave()


def test_what_a_killed_process_left_is_found_again_by_its_deployment(tmp_path: Path):
    _killed_inside(tmp_path)
    home = EmbeddingHome(SECRET, "ns", tmp_path)
    assert sweep_dead_homes(tmp_path) == []
    assert (home.path / "model").exists()
    assert home.leave()


def test_what_a_killed_process_left_is_swept_by_any_other(tmp_path: Path):
    _killed_inside(tmp_path)
    other = EmbeddingHome(SECRET, "other", tmp_path)
    [swept] = sweep_dead_homes(tmp_path)
    assert swept.startswith(PREFIX)
    assert list(tmp_path.iterdir()) == [other.path]


def test_a_directory_that_never_got_a_member_goes_when_it_is_old(tmp_path: Path):
    (tmp_path / f"{PREFIX}0").mkdir(mode=0o700)
    sweep_dead_homes(tmp_path)
    assert (tmp_path / f"{PREFIX}0").exists()
    os.utime(tmp_path / f"{PREFIX}0", (1, 1))
    sweep_dead_homes(tmp_path)
    assert not (tmp_path / f"{PREFIX}0").exists()


def test_many_that_come_and_go_at_once_never_lose_their_home(tmp_path: Path):
    code = (
        "import sys; from pathlib import Path\n"
        "from transfer.embeddings.home import EmbeddingHome, sweep_dead_homes\n"
        "for _ in range(100):\n"
        "    home = EmbeddingHome(bytes(range(32)), 'ns', Path(sys.argv[1]))\n"
        "    assert (home.path / 'alive').exists()\n"
        "    sweep_dead_homes(Path(sys.argv[1]))\n"
        "    assert (home.path / 'alive').exists()\n"
        "    home.leave()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    several = [subprocess.Popen(command) for _ in range(3)]
    assert [process.wait(60) for process in several] == [0, 0, 0]
    assert list(tmp_path.iterdir()) == []


def _killed_inside(directory: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path\n"
        "from transfer.embeddings.home import EmbeddingHome\n"
        "home = EmbeddingHome(bytes(range(32)), 'ns', Path(sys.argv[1]))\n"
        "(home.path / 'model').mkdir()\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(directory)], timeout=60)
