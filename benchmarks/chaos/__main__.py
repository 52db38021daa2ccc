"""``python -m benchmarks.chaos``: what clients notice while processes are taken away.

Several clients ask three frontends before mock workers, and then two before real engines,
while workers and frontends are killed, told to end, paused, cut off and started again.
Every request is accounted for. docs/reliability.md says what may happen to one.
"""

import asyncio
import sys

from benchmarks.metrics import Metric
from benchmarks.runner import Section, parser_of, prepare_for_vllm, run


def main() -> int:
    parser = parser_of("chaos", __doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="both phases together")
    parser.add_argument("--mock-only", action="store_true", help="leave real engines out")
    parser.add_argument("--real-only", action="store_true", help="leave mock engines out")
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    prepare_for_vllm(quiet=False)

    from benchmarks.chaos.phase import Plan, run_phase
    from benchmarks.chaos.report import GOALS, metrics, table

    seconds = options.minutes * 60
    both = not (options.mock_only or options.real_only)
    mock = Plan(
        "3 frontends, 4 mock workers", "mock", seconds * (0.6 if both else 1.0), frontends=3,
        workers=4, clients=options.clients, tokens=90, pause=(4.0, 10.0), seed=options.seed,
    )
    real = Plan(
        "2 frontends, 2 vLLM engines", "vllm", seconds * (0.4 if both else 1.0), frontends=2,
        workers=2, clients=max(1, options.clients // 3), tokens=48, pause=(10.0, 20.0),
        seed=options.seed,
    )
    plans = [] if options.real_only else [mock]
    plans += [] if options.mock_only else [real]

    def measure() -> list[Metric]:
        results = [asyncio.run(run_phase(plan)) for plan in plans]
        print(table(results))
        return metrics(results)

    return run([Section("chaos", GOALS, measure)])


if __name__ == "__main__":
    sys.exit(main())
