"""``python -m frontend``: the OpenAI-compatible frontend."""

import sys

from frontend.launch import launch

if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
