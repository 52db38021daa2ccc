"""``python -m benchmarks.soak``: whether memory stops growing.

Shows a fleet 10,000 pictures in 30 minutes, no two alike, and prints the memory of every
process: once caches are full, nothing more may be added.
"""

import argparse
import os
import sys
import traceback


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--pictures", type=int, default=10_000)
    parser.add_argument("--engine", choices=("vllm", "mock"), default="vllm")
    options = parser.parse_args()

    # Read by vLLM when it is imported, here and in the processes started from here.
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"

    from benchmarks import machine
    from benchmarks.metrics import unmeasured
    from benchmarks.processes import ended_by_sigterm
    from benchmarks.soak.run import PROMISED, Plan, soak

    print(machine.describe(), flush=True)
    try:
        with ended_by_sigterm():
            measured = soak(Plan(options.minutes, options.pictures, options.engine))
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        traceback.print_exc()
        for metric in unmeasured(PROMISED, f"{type(error).__name__}: {error}"):
            print(metric.line())
        return 1
    for metric in measured:
        print(metric.line())
    return 0


if __name__ == "__main__":
    sys.exit(main())
