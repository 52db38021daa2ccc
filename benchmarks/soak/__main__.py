"""``python -m benchmarks.soak``: whether memory stops growing.

Shows a fleet 10,000 pictures in 30 minutes, no two alike, and prints the memory of every
process: once caches are full, nothing more may be added.
"""

import sys

from benchmarks.runner import Section, parser_of, prepare_for_vllm, run


def main() -> int:
    parser = parser_of("soak", __doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--pictures", type=int, default=10_000)
    parser.add_argument("--engine", choices=("vllm", "mock"), default="vllm")
    options = parser.parse_args()
    prepare_for_vllm(quiet=False)

    from benchmarks.soak.run import PROMISED, Plan, soak

    plan = Plan(options.minutes, options.pictures, options.engine)
    return run([Section("soak", PROMISED, lambda: soak(plan))])


if __name__ == "__main__":
    sys.exit(main())
