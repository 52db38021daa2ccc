"""``python -m benchmarks.replay``: the router before many engines, in simulated time.

Replays traces with the frontend's own routing code in front of mock engines, and compares
kv with round-robin, random, least-loaded, and with an oracle that knows every cache.
"""

import sys
import time
from pathlib import Path

from benchmarks.runner import ended_by_sigterm, parser_of, prepare_for_vllm


def main() -> int:
    parser = parser_of("replay", __doc__)
    parser.add_argument("--workers", type=int, default=64, help="Engines (default: 64).")
    parser.add_argument("--seed", type=int, default=1, help="Of traces and of chance.")
    parser.add_argument(
        "--workload", nargs="+", default=[], metavar="NAME",
        help="Made-up traces to replay (default: all, unless --trace is given).",
    )
    parser.add_argument(
        "--trace", nargs="+", type=Path, default=[], metavar="FILE",
        help="Trace files to replay.",
    )
    parser.add_argument("--plots", type=Path, metavar="DIR", help="Draw replay-*.png there.")
    parser.add_argument(
        "--write-traces", type=Path, metavar="DIR",
        help="Write the made-up traces there, and replay nothing.",
    )
    options = parser.parse_args()

    prepare_for_vllm()

    from benchmarks import machine
    from benchmarks.metrics import CannotMeasure
    from benchmarks.replay.plots import draw
    from benchmarks.replay.results import metrics_of, table, worst_over_least_loaded
    from benchmarks.replay.run import compare_all
    from benchmarks.replay.trace import BadTrace, read_trace, write_trace
    from benchmarks.replay.workloads import WORKLOADS

    if unknown := set(options.workload) - set(WORKLOADS):
        parser.error(f"no such workload: {', '.join(sorted(unknown))}")
    if options.workers < 1:
        parser.error("--workers must be at least 1")
    names = options.workload or ([] if options.trace else list(WORKLOADS))
    traces = {name: WORKLOADS[name](options.workers, options.seed) for name in names}
    if options.write_traces:
        options.write_traces.mkdir(parents=True, exist_ok=True)
        for name, trace in traces.items():
            write_trace(options.write_traces / f"{name}.jsonl", trace)
        return 0
    try:
        for path in options.trace:
            traces[path.stem] = read_trace(path)
    except (OSError, BadTrace) as error:
        parser.error(str(error))

    began = time.monotonic()
    print(f"{options.workers} mock workers, seed {options.seed} ({machine.describe()})")
    done = {}
    try:
        with ended_by_sigterm():
            for compared in compare_all(traces, options.workers, options.seed):
                done[compared.name] = compared.figures
                print(
                    f"\n{compared.name}: {compared.num_requests} requests, at most "
                    f"{compared.boundless_hit_ratio:.3f} could hit, "
                    f"{compared.preemptions} preemptions ({compared.wall_seconds:.0f} s)"
                )
                print("\n".join(table(compared.figures)), flush=True)
    except KeyboardInterrupt:
        return 130
    figures = {name: done[name] for name in traces}
    if options.plots:
        try:
            for path in draw(figures, options.plots):
                print(f"drew {path}")
        except CannotMeasure as why:
            print(f"No plots: {why}")
    worst, where = worst_over_least_loaded(figures)
    print(f"\nkv compares worst with least-loaded at {where}: {worst:.3f}")
    print(f"Replayed in {time.monotonic() - began:.0f} s.")
    for metric in metrics_of(figures):
        print(metric.line())
    return 0


if __name__ == "__main__":
    sys.exit(main())
