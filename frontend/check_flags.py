"""``python -m frontend.check_flags FLAGS``: reads a command line, and does no more.

Exits with 0 where a frontend would take it, else with 2 and a sentence on standard error.
"""

from __future__ import annotations

import os
import sys


def main() -> int:
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"  # as frontend.launch does

    from configs.flags import BadSetting
    from frontend.command_line import parse

    try:
        parse(sys.argv[1:])
    except (BadSetting, ValueError) as error:
        print(f"python -m frontend: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
