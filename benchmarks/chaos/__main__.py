"""``python -m benchmarks.chaos``: what clients notice while processes are taken away.

Several clients ask three frontends before mock workers, and then two before real engines,
while workers and frontends are killed, told to end, paused, cut off and started again.
Every request is accounted for. docs/reliability.md says what may happen to one.
"""

import argparse
import asyncio
import os
import sys
import traceback


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--minutes", type=float, default=10.0, help="both phases together")
    parser.add_argument("--mock-only", action="store_true", help="leave real engines out")
    parser.add_argument("--real-only", action="store_true", help="leave mock engines out")
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    # Read by vLLM when it is imported, here and in the processes started from here.
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"

    from benchmarks import machine
    from benchmarks.chaos.phase import Plan, run_phase
    from benchmarks.chaos.report import GOALS, PhaseResult, metrics, table
    from benchmarks.metrics import unmeasured
    from benchmarks.processes import ended_by_sigterm

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
    print(machine.describe())
    results: list[PhaseResult] = []
    try:
        with ended_by_sigterm():
            for plan in plans:
                results.append(asyncio.run(run_phase(plan)))
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        traceback.print_exc()
        for metric in unmeasured(GOALS, f"{type(error).__name__}: {error}"):
            print(metric.line())
        return 1
    print(table(results))
    print()
    for metric in metrics(results):
        print(metric.line())
    return 0


if __name__ == "__main__":
    sys.exit(main())
