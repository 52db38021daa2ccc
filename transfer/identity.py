"""What an image is, for caching and routing: a digest of its processed inputs.

The same picture re-encoded, renamed or re-signed gives the same tensors and so the same
identity. A secret seed, shared by a deployment, keeps outsiders from making two images
collide. Everything that is hashed is preceded by its kind and length, so that no two
different inputs feed the same bytes.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
import xxhash
from blake3 import blake3

from transfer.errors import BadSeed

Algorithm = Literal["xxh3_128", "blake3"]
SEED_BYTES = 32

CHUNK_BYTES = 256 << 10
"""Copied and digested at once: small enough to stay in a core's own cache between."""


@dataclass(frozen=True, slots=True)
class Moving:
    """A tensor that is copied to ``target`` while it is digested.

    Memory is the bottleneck of both, so its bytes are fetched once. ``target`` has as many
    bytes as the tensor and is writable; it receives them in row-major order.
    """

    tensor: torch.Tensor
    target: memoryview


class _Hash(Protocol):
    def update(self, data: Any, /) -> Any: ...
    def digest(self) -> bytes: ...


class IdentityHasher:
    """Digests processed inputs: 16 bytes with ``xxh3_128``, 32 with ``blake3``.

    Safe to use from several threads.

    Raises:
        ValueError: the seed has not 32 bytes, or the algorithm is not known.
    """

    def __init__(self, seed: bytes, algorithm: Algorithm = "xxh3_128") -> None:
        if len(seed) != SEED_BYTES:
            raise ValueError(f"a seed has {SEED_BYTES} bytes, not {len(seed)}")
        if algorithm not in ("xxh3_128", "blake3"):
            raise ValueError(f"unknown algorithm {algorithm!r}")
        self.algorithm = algorithm
        self._seed = seed

    @property
    def fingerprint(self) -> str:
        """16 hex digits that name the seed without telling it."""
        return hashlib.sha256(b"foveal-fingerprint" + self._seed).hexdigest()[:16]

    def digest(self, fields: Iterable[tuple[str, Any]], model: str) -> bytes:
        """Digest one item.

        Args:
            fields: names with their data: a tensor, a number, or nested lists of these.
                A tensor may stand in a ``Moving``, which makes no difference to the digest.
            model: what the inputs were processed for.

        Raises:
            TypeError: some data is none of these.
        """
        hash_ = self._new_hash()
        _feed_bytes(hash_, model.encode())
        ordered = sorted(fields, key=lambda field: field[0])
        _feed_length(hash_, len(ordered))
        for name, data in ordered:
            _feed_bytes(hash_, name.encode())
            _feed_data(hash_, data)
        return hash_.digest()

    def _new_hash(self) -> _Hash:
        if self.algorithm == "blake3":
            return blake3(key=self._seed)
        # xxh3 takes 64 bits of seed; the rest of the secret goes in first.
        hash_ = xxhash.xxh3_128(seed=int.from_bytes(self._seed[:8], "little"))
        hash_.update(self._seed)
        return hash_


def load_or_create_seed(path: Path) -> bytes:
    """Return the deployment's seed, making it (mode 0600) if there is none yet.

    Processes that start at once agree on one seed: it appears under its name complete,
    and only one of them can put it there.

    Raises:
        BadSeed: the file is not one that only its owner reads, or has not 32 bytes.
        OSError: the file can be neither read nor made.
    """
    if not os.path.lexists(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _create_seed(path)
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with open(fd, "rb") as file:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise BadSeed(f"{path} is not a regular file")
        if mode & 0o077:
            raise BadSeed(
                f"others may use the seed in {path} (mode {stat.S_IMODE(mode):o}): "
                "make a new one, or chmod 600 it if nobody has read it"
            )
        seed = file.read(SEED_BYTES + 1)
    if len(seed) != SEED_BYTES:
        raise BadSeed(f"{path} has not the {SEED_BYTES} bytes of a seed")
    return seed


def _create_seed(path: Path) -> None:
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(secrets.token_bytes(SEED_BYTES))
            file.flush()
            os.fsync(fd)
        # If another process was first, its seed is the one.
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()


def _feed_data(hash_: _Hash, data: Any) -> None:
    if isinstance(data, torch.Tensor):
        _feed_tensor_kind(hash_, data)
        _feed_bytes(hash_, tensor_bytes(data))
    elif isinstance(data, Moving):
        _feed_tensor_kind(hash_, data.tensor)
        _feed_length(hash_, data.target.nbytes)
        source = np.frombuffer(tensor_bytes(data.tensor), np.uint8)
        target = np.frombuffer(data.target, np.uint8)
        for start in range(0, source.size, CHUNK_BYTES):
            part = target[start : start + CHUNK_BYTES]
            np.copyto(part, source[start : start + CHUNK_BYTES])
            hash_.update(part.data)
    elif isinstance(data, list | tuple):
        hash_.update(b"L")
        _feed_length(hash_, len(data))
        for part in data:
            _feed_data(hash_, part)
    elif isinstance(data, bool | int):
        hash_.update(b"B" if isinstance(data, bool) else b"I")
        _feed_bytes(hash_, str(int(data)).encode())
    elif isinstance(data, float):
        hash_.update(b"F" + struct.pack("<d", data))
    else:
        raise TypeError(f"{type(data).__name__} has no identity")


def _feed_tensor_kind(hash_: _Hash, tensor: torch.Tensor) -> None:
    hash_.update(b"T")
    _feed_bytes(hash_, str(tensor.dtype).encode())
    _feed_length(hash_, tensor.dim())
    for length in tensor.shape:
        _feed_length(hash_, length)


def _feed_bytes(hash_: _Hash, data: bytes | memoryview) -> None:
    _feed_length(hash_, len(data))
    hash_.update(data)


def _feed_length(hash_: _Hash, length: int) -> None:
    hash_.update(struct.pack("<Q", length))


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the elements of a tensor in row-major order as bytes.

    Nothing is copied if the tensor lies contiguous in host memory.
    """
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return flat.numpy().data
