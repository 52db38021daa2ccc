"""``python -m benchmarks.path [SECTION ...]``: what the path of a picture costs.

Sections, all by default: ``size`` (request messages), ``handover`` (processor output to
model runner: copies and time), ``fleet`` (text latency and KV routing).
"""

import sys
from functools import partial

from benchmarks.runner import Section, chosen_sections, prepare_for_vllm
from benchmarks.runner import run as run_sections


def main() -> int:
    names = chosen_sections("path", __doc__, ("size", "handover", "fleet"))
    prepare_for_vllm()

    from benchmarks.path.sections import PROMISED, run

    return run_sections([Section(name, PROMISED[name], partial(run, name)) for name in names])


if __name__ == "__main__":
    sys.exit(main())
