"""``python -m transfer.make_keys DIR``: the keys that ``--secure-keys DIR`` asks for.

Makes a pair for workers and a pair for frontends. Every host needs the directory, or of it:
workers ``worker.key_secret`` and ``frontend.key``, frontends ``frontend.key_secret`` and
``worker.key``. Whoever holds a secret key can speak for its side.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from transfer.access import make_keys
from transfer.errors import BadKeys


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m transfer.make_keys",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=Path, help="new or empty directory for the keys")
    directory: Path = parser.parse_args(arguments).directory
    try:
        for path in make_keys(directory):
            print(path)
    except BadKeys as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
