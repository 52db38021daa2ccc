"""``python -m benchmarks.router [SECTION ...]``: what routing costs the frontend.

Sections, all by default: ``index`` (look-ups, ingestion and memory with a million resident
blocks, beside the Rust RadixTree of ai-dynamo-runtime), ``decision`` (hashing a prompt and
choosing a worker).

All times are processor time: nothing measured here waits, and so a busy machine distorts
it least.
"""

import argparse
import os
import sys
import time
import traceback

SECTIONS = ("index", "decision")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("section", nargs="*", help=f"any of: {', '.join(SECTIONS)}")
    chosen = parser.parse_args().section or SECTIONS
    if unknown := set(chosen) - set(SECTIONS):
        parser.error(f"no such section: {', '.join(sorted(unknown))}")

    # Read by vLLM when it is imported.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"

    from benchmarks import machine
    from benchmarks.metrics import Metric, unmeasured
    from benchmarks.processes import ended_by_sigterm
    from benchmarks.router import decision, index

    sections = {"index": index, "decision": decision}
    metrics: list[Metric] = []
    failed = False
    began = time.monotonic()
    try:
        with ended_by_sigterm():
            for name in (section for section in SECTIONS if section in chosen):
                elapsed = time.monotonic() - began
                print(f"\n{name} ({elapsed:.0f} s; {machine.describe()})", flush=True)
                try:
                    metrics += sections[name].measure()
                except Exception as error:  # one section must not cost the others
                    traceback.print_exc()
                    why = f"{type(error).__name__}: {error}"
                    metrics += unmeasured(sections[name].PROMISED, why)
                    failed = True
    except KeyboardInterrupt:
        return 130
    print(f"\nMeasured in {time.monotonic() - began:.0f} s.")
    for metric in metrics:
        print(metric.line())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
