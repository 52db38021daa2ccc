"""``python -m benchmarks.embed``: what sharing encoder outputs among workers spares.

Large images are asked about again after their KV blocks and the engine's own encoder
cache have gone: of a worker that shares its host's encoder outputs, and in turns of one
that does not. Two workers that share are asked about every image, and their encoder runs
are counted. Last, images that nobody has seen are asked about with an encode worker in
the fleet and without.
"""

import os
import sys
import time
import traceback


def main() -> int:
    # Read by vLLM when it is imported, here and in the processes started from here.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"

    from benchmarks import machine
    from benchmarks.embed.fleets import PROMISED, measure
    from benchmarks.metrics import CannotMeasure, Metric, unmeasured
    from benchmarks.processes import ended_by_sigterm

    failed = False
    began = time.monotonic()
    print(f"\nembed ({machine.describe()})", flush=True)
    metrics: list[Metric] = []
    try:
        with ended_by_sigterm():
            for metric in measure():
                metrics.append(metric)
    except KeyboardInterrupt:
        return 130
    except CannotMeasure as why:
        metrics += unmeasured(_left(PROMISED, [m.name for m in metrics]), str(why))
    except Exception as error:  # what has been measured is still printed
        traceback.print_exc()
        left = _left(PROMISED, [m.name for m in metrics])
        metrics += unmeasured(left, f"{type(error).__name__}: {error}")
        failed = True
    print(f"\nMeasured in {time.monotonic() - began:.0f} s.")
    for metric in metrics:
        print(metric.line())
    return 1 if failed else 0


def _left(
    promised: list[tuple[str, str, str | None]], done: list[str]
) -> list[tuple[str, str, str | None]]:
    return [each for each in promised if each[0] not in done]


if __name__ == "__main__":
    sys.exit(main())
