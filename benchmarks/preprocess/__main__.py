"""``python -m benchmarks.preprocess [SECTION ...]``: what a picture costs the frontend.

Sections, all by default: ``pool`` (preprocess processes alone), ``unique`` (pictures
nobody has seen, through the frontend), ``repeated`` (a large picture seen before, beside
plain vLLM). Workers are posed: they answer at once.
"""

import argparse
import os
import sys
import time
import traceback

SECTIONS = ("pool", "unique", "repeated")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.preprocess",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("section", nargs="*", help=f"any of: {', '.join(SECTIONS)}")
    chosen = parser.parse_args().section or SECTIONS
    if unknown := set(chosen) - set(SECTIONS):
        parser.error(f"no such section: {', '.join(sorted(unknown))}")

    # Read by vLLM when it is imported, here and in the processes started from here.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"

    from benchmarks import machine
    from benchmarks.metrics import CannotMeasure, Metric, unmeasured
    from benchmarks.preprocess.sections import PROMISED, run
    from benchmarks.processes import ended_by_sigterm

    metrics: list[Metric] = []
    failed = False
    began = time.monotonic()
    try:
        with ended_by_sigterm():
            for name in (section for section in SECTIONS if section in chosen):
                elapsed = time.monotonic() - began
                print(f"\n{name} ({elapsed:.0f} s; {machine.describe()})", flush=True)
                try:
                    metrics += run(name)
                except CannotMeasure as why:
                    metrics += unmeasured(PROMISED[name], str(why))
                except Exception as error:  # one section must not cost the others
                    traceback.print_exc()
                    metrics += unmeasured(PROMISED[name], f"{type(error).__name__}: {error}")
                    failed = True
    except KeyboardInterrupt:
        return 130
    print(f"\nMeasured in {time.monotonic() - began:.0f} s.")
    for metric in metrics:
        print(metric.line())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
