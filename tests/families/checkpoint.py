"""Generates the checkpoint of a family, tiny and with seeded random weights.

    python -m tests.families.checkpoint DIR [NAME ...]

A checkpoint that DIR holds already is left alone.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import shutil
import sys
import tempfile
from pathlib import Path

from tests.families.table import FAMILIES, Family

RECIPES = Path(__file__).parent / "recipes"
STAMP = "recipe.txt"


def stamp() -> str:
    """What checkpoints depend on: the recipes, and who saves them."""
    digest = hashlib.sha256(importlib.metadata.version("transformers").encode())
    for file in (Path(__file__), *sorted(RECIPES.iterdir())):
        if file.is_file():
            digest.update(file.read_bytes())
    return digest.hexdigest() + "\n"


def write_checkpoint(family: Family, directory: Path) -> Path:
    """Make sure that ``directory`` holds the family's checkpoint; returns where."""
    target = directory / family.name
    wanted = stamp()
    if (target / STAMP).is_file() and (target / STAMP).read_text() == wanted:
        return target
    # These import torch and transformers' models, which takes longer than the rest.
    from tests.families.recipes.parts import save

    module, _, function = family.recipe.partition(".")
    recipes = importlib.import_module(f"tests.families.recipes.{module}")
    parts = getattr(recipes, function)()
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=directory) as work:
        fresh = Path(work) / "fresh"
        save(parts, fresh)
        (fresh / STAMP).write_text(wanted)
        shutil.rmtree(target, ignore_errors=True)
        fresh.rename(target)
    return target


def main() -> None:
    directory, *names = sys.argv[1:]
    for name in names or FAMILIES:
        print(write_checkpoint(FAMILIES[name], Path(directory)), flush=True)


if __name__ == "__main__":
    main()
