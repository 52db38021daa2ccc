from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from transfer.errors import BadSeed
from transfer.identity import (
    CHUNK_BYTES,
    IdentityHasher,
    Moving,
    _create_seed,
    load_or_create_seed,
)

SEED = bytes(range(32))
ALGORITHMS = ("xxh3_128", "blake3")


def digest(fields: dict[str, Any], model: str = "m", **options: Any) -> bytes:
    return IdentityHasher(options.pop("seed", SEED), **options).digest(fields.items(), model)


@pytest.mark.parametrize(("algorithm", "length"), [("xxh3_128", 16), ("blake3", 32)])
def test_equal_inputs_have_one_identity_of_known_length(algorithm: str, length: int) -> None:
    one = digest({"a": torch.arange(6), "b": 1}, algorithm=algorithm)
    assert one == digest({"b": 1, "a": torch.arange(6)}, algorithm=algorithm)
    assert len(one) == length


BYTES = torch.arange(16, dtype=torch.uint8)

DIFFERENT: dict[str, dict[str, Any]] = {
    "reference": {"a": BYTES},
    "one bit": {"a": torch.cat([BYTES[:15], torch.tensor([14], dtype=torch.uint8)])},
    "name": {"b": BYTES},
    "dtype": {"a": BYTES.view(torch.int8)},
    "wider dtype": {"a": BYTES.view(torch.bfloat16)},
    "other wider dtype": {"a": BYTES.view(torch.float16)},
    "shape": {"a": BYTES.view(4, 4)},
    "other shape": {"a": BYTES.view(2, 8)},
    "extra dimension": {"a": BYTES.view(1, 16)},
    "transposed": {"a": BYTES.view(4, 4).T},
    "in a list": {"a": [BYTES]},
    "split": {"a": [BYTES[:8], BYTES[8:]]},
    "split elsewhere": {"a": [BYTES[:4], BYTES[4:]]},
    "nested": {"a": [[BYTES[:8], BYTES[8:]]]},
    "nested otherwise": {"a": [[BYTES[:8]], [BYTES[8:]]]},
    "empty list": {"a": []},
    "empty tensor": {"a": BYTES[:0]},
    "two fields": {"a": BYTES[:8], "b": BYTES[8:]},
    "no fields": {},
    "integer": {"a": 1},
    "float": {"a": 1.0},
    "truth": {"a": True},
    "negative": {"a": -1},
    "scalar tensor": {"a": torch.tensor(1)},
    "vector of one": {"a": torch.tensor([1])},
    "huge integer": {"a": 2**70},
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_whatever_differs_has_another_identity(algorithm: str) -> None:
    digests = [digest(fields, algorithm=algorithm) for fields in DIFFERENT.values()]
    digests += [
        digest({"a": BYTES}, model="n", algorithm=algorithm),
        digest({"a": BYTES}, seed=bytes([9, *SEED[1:]]), algorithm=algorithm),
        digest({"a": BYTES}, seed=bytes([*SEED[:31], 9]), algorithm=algorithm),
    ]
    assert len(set(digests)) == len(digests)


def test_lengths_keep_neighbours_apart() -> None:
    assert digest({"ab": 1}, model="c") != digest({"b": 1}, model="ca")
    assert digest({"a": [[1], 2]}) != digest({"a": [[1, 2]]})
    # What stands between the model and the first name, as part of either of them.
    count = "\1" + 7 * "\0"
    assert digest({count + "a": 1}, model="") != digest({"a": 1}, model=count)


def test_a_tuple_counts_as_a_list_and_layout_does_not_count() -> None:
    assert digest({"a": (BYTES, 1)}) == digest({"a": [BYTES, 1]})
    spread = torch.zeros(16, 2, dtype=torch.uint8)
    spread[:, 0] = BYTES
    assert not spread[:, 0].is_contiguous()
    assert digest({"a": spread[:, 0]}) == digest({"a": BYTES})


@pytest.mark.parametrize("data", ["text", None, {"a": 1}, [b"bytes"]])
def test_what_has_no_identity_is_refused(data: Any) -> None:
    with pytest.raises(TypeError, match="no identity"):
        digest({"a": data})


def test_a_wrong_seed_or_algorithm_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes, not 31"):
        IdentityHasher(bytes(31))
    with pytest.raises(ValueError, match="md5"):
        IdentityHasher(SEED, "md5")  # type: ignore[arg-type]


def test_the_fingerprint_names_the_seed_without_telling_it() -> None:
    fingerprint = IdentityHasher(SEED).fingerprint
    assert fingerprint == IdentityHasher(SEED, "blake3").fingerprint
    assert fingerprint != IdentityHasher(bytes(32)).fingerprint
    assert len(bytes.fromhex(fingerprint)) == 8
    assert fingerprint not in SEED.hex()


def test_a_seed_is_made_once(tmp_path: Path) -> None:
    path = tmp_path / "registry" / "seed"
    seed = load_or_create_seed(path)
    assert len(seed) == 32
    assert len(set(seed)) > 8
    assert load_or_create_seed(path) == seed
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_or_create_seed(tmp_path / "other") != seed
    assert [entry.name for entry in path.parent.iterdir()] == ["seed"]


def test_whoever_comes_second_keeps_the_first_one_s_seed(tmp_path: Path) -> None:
    path = tmp_path / "seed"
    _create_seed(path)
    seed = load_or_create_seed(path)
    _create_seed(path)
    assert load_or_create_seed(path) == seed
    assert [entry.name for entry in tmp_path.iterdir()] == ["seed"]


def test_all_who_start_at_once_agree_on_one_seed(tmp_path: Path) -> None:
    def start() -> bytes:
        barrier.wait()
        return load_or_create_seed(tmp_path / "seed")

    barrier = threading.Barrier(8)
    with ThreadPoolExecutor(8) as pool:
        starters = [pool.submit(start) for _ in range(8)]
    assert len({starter.result() for starter in starters}) == 1


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_seed_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "seed"
    load_or_create_seed(path)
    path.chmod(mode)
    with pytest.raises(BadSeed, match=f"mode {mode:o}"):
        load_or_create_seed(path)


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_seed_of_another_length_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "seed"
    path.write_bytes(bytes(length))
    path.chmod(0o600)
    with pytest.raises(BadSeed, match="32 bytes"):
        load_or_create_seed(path)


def test_a_link_in_place_of_a_seed_is_refused(tmp_path: Path) -> None:
    load_or_create_seed(tmp_path / "real")
    (tmp_path / "seed").symlink_to(tmp_path / "real")
    with pytest.raises(OSError):
        load_or_create_seed(tmp_path / "seed")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("length", [0, 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 3])
def test_a_moving_tensor_is_copied_and_has_the_same_identity(
    algorithm: str, length: int
) -> None:
    tensor = torch.arange(length).to(torch.uint8)
    target = bytearray(b"\xff" * length)
    moving = Moving(tensor, memoryview(target))
    fields = {"a": [moving, 1], "b": 2}
    assert digest(fields, algorithm=algorithm) == digest(
        {"a": [tensor, 1], "b": 2}, algorithm=algorithm
    )
    assert bytes(target) == tensor.numpy().tobytes()


def test_a_moving_tensor_is_copied_in_row_major_order() -> None:
    tensor = torch.arange(6, dtype=torch.int16).view(2, 3).T
    target = bytearray(12)
    assert digest({"a": Moving(tensor, memoryview(target))}) == digest({"a": tensor})
    assert torch.frombuffer(target, dtype=torch.int16).tolist() == [0, 3, 1, 4, 2, 5]
