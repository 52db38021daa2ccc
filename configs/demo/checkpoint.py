"""Generates the demo checkpoint: a tiny Qwen2.5-VL with seeded random weights.

    python -m configs.demo.checkpoint DIR

A DIR that holds it already is left alone; one of an older recipe is replaced as a whole.
"""

import argparse
import hashlib
import importlib.metadata
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
RECIPE_FILES = ("checkpoint.py", "tiny_model.py", "chat_template.jinja")
RECIPE_STAMP = "recipe.txt"


def recipe() -> str:
    """What the checkpoint depends on: files here, and who saves it."""
    digest = hashlib.sha256(importlib.metadata.version("transformers").encode())
    for name in RECIPE_FILES:
        digest.update((HERE / name).read_bytes())
    return digest.hexdigest() + "\n"


def is_current(target: Path) -> bool:
    try:
        return (target / RECIPE_STAMP).read_text() == recipe()
    except OSError:
        return False


def write_checkpoint(target: Path) -> bool:
    """Make sure `target` holds the checkpoint; true if it had to be generated."""
    if is_current(target):
        return False
    from configs.demo import tiny_model  # imports torch, which takes longer than the rest

    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as work:
        fresh = Path(work) / "fresh"
        tiny_model.save(fresh)
        for file in fresh.iterdir():
            file.chmod(0o644)
        (fresh / RECIPE_STAMP).write_text(recipe())
        put_in_place(fresh, target, Path(work) / "old")
    return True


def put_in_place(fresh: Path, target: Path, old: Path) -> None:
    """Rename, so that no half-written checkpoint is ever seen; another writer may win."""
    if target.exists():
        target.rename(old)
    try:
        fresh.rename(target)
    except OSError:
        if not is_current(target):
            raise
    shutil.rmtree(old, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate the demo checkpoint.")
    parser.add_argument("dir", type=Path, help="where to write it")
    target: Path = parser.parse_args().dir
    if is_current(target):
        print(f"The demo checkpoint in {target} is up to date.")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves no half-written files
    print(f"Generating a tiny random Qwen2.5-VL in {target} ...", flush=True)
    began = time.monotonic()
    write_checkpoint(target)
    size = sum(file.stat().st_size for file in target.iterdir()) / 1e6
    print(f"Generated {size:.1f} MB in {time.monotonic() - began:.1f} s.")


if __name__ == "__main__":
    main()
