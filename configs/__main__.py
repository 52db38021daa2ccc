"""``foveal``, and ``python -m configs`` where the package is not installed.

Begins by what Ctrl-C does, before what takes a moment to import.
"""

import signal
import sys


def main() -> int:
    """Run ``configs.cli``; Ctrl-C before that can be ready ends the process without a word."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from configs import cli

    signal.signal(signal.SIGINT, signal.default_int_handler)
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
