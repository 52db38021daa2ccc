"""``python -m workers.check_flags FLAGS``: reads a command line, and does no more.

Exits with 0 where a worker would take it, else with 2 and a sentence on standard error.
"""

from __future__ import annotations

import os
import sys


def main() -> int:
    # The host that checks a file need not have the GPU of the worker.
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")

    from configs.flags import BadSetting
    from workers.engine_args import parse

    try:
        parse(sys.argv[1:])
    except (BadSetting, ValueError) as error:
        print(f"python -m workers: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
