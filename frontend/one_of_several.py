"""``python -m frontend.one_of_several DIRECTORY ...``: what ``--frontends`` starts several of.

``DIRECTORY`` is where they meet (frontend/siblings.py).
"""

import sys
from pathlib import Path

from frontend.launch import launch

if __name__ == "__main__":
    sys.exit(launch(sys.argv[2:], siblings=Path(sys.argv[1])))
