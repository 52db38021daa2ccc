"""``python -m benchmarks.transfer``: how long does it take to hand pixels over?

From the processor's output in one process to a usable tensor in another, by Foveal's
ways, by those of vLLM, torch and Dynamo, and, as a floor, one copy of the same bytes.
"""

import argparse
import os
import sys
import time
import traceback


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transfer", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.parse_args()

    # Read by vLLM when it is imported.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"

    from benchmarks import machine
    from benchmarks.metrics import CannotMeasure, Metric, unmeasured
    from benchmarks.processes import ended_by_sigterm
    from benchmarks.transfer.figures import wanted
    from benchmarks.transfer.measure import WAYS, measure

    def none(why: str) -> list[Metric]:
        return unmeasured([(each.name, each.unit, each.goal) for each in wanted(WAYS)], why)

    failed = False
    began = time.monotonic()
    print(f"transfer ({machine.describe()})", flush=True)
    try:
        with ended_by_sigterm():
            metrics = measure()
    except KeyboardInterrupt:
        return 130
    except CannotMeasure as why:
        metrics = none(str(why))
    except Exception as error:
        traceback.print_exc()
        metrics = none(f"{type(error).__name__}: {error}")
        failed = True
    print(f"\nMeasured in {time.monotonic() - began:.0f} s.")
    for metric in metrics:
        print(metric.line())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
