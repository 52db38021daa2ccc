"""``python -m benchmarks.transfer``: how long does it take to hand pixels over?

From the processor's output in one process to a usable tensor in another, by Foveal's
ways, by those of vLLM, torch and Dynamo, and, as a floor, one copy of the same bytes.
"""

import sys

from benchmarks.runner import Section, parser_of, prepare_for_vllm, run


def main() -> int:
    parser_of("transfer", __doc__).parse_args()
    prepare_for_vllm()

    from benchmarks.transfer.figures import wanted
    from benchmarks.transfer.measure import WAYS, measure

    promised = [(each.name, each.unit, each.goal) for each in wanted(WAYS)]
    return run([Section("transfer", promised, measure)])


if __name__ == "__main__":
    sys.exit(main())
