"""``python -m configs``: the ``foveal`` command where it is not installed."""

import sys

from configs.cli import main

if __name__ == "__main__":
    sys.exit(main())
