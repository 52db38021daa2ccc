"""``python -m frontend.one_of_several``: what ``--frontends`` starts several of."""

import sys

from frontend.launch import launch

if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:], one_of_several=True))
