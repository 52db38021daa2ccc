"""``python -m benchmarks.preprocess [SECTION ...]``: what a picture costs the frontend.

Sections, all by default: ``pool`` (preprocess processes alone), ``unique`` (pictures
nobody has seen, through the frontend), ``repeated`` (a large picture seen before, beside
plain vLLM). Workers are posed: they answer at once.
"""

import sys
from functools import partial

from benchmarks.runner import Section, chosen_sections, prepare_for_vllm
from benchmarks.runner import run as run_sections


def main() -> int:
    names = chosen_sections("preprocess", __doc__, ("pool", "unique", "repeated"))
    prepare_for_vllm()

    from benchmarks.preprocess.sections import PROMISED, run

    return run_sections([Section(name, PROMISED[name], partial(run, name)) for name in names])


if __name__ == "__main__":
    sys.exit(main())
