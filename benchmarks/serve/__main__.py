"""``make bench-serve``: Foveal beside vLLM and NVIDIA Dynamo, all on this machine.

Ends with the medians as a table, and one line of JSON per metric (benchmarks/metrics.py).
A ratio above 1 is in our favour, of requests per second and of time to first token alike.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from benchmarks.runner import ended_by_sigterm, parser_of


def main(arguments: list[str]) -> int:
    from benchmarks import machine
    from benchmarks.metrics import CannotMeasure
    from benchmarks.serve.compare import Comparison, Plan
    from benchmarks.serve.plots import draw
    from benchmarks.serve.results import metrics_of, raw, table
    from benchmarks.serve.systems import SYSTEMS
    from benchmarks.serve.workloads import WORKLOADS

    parser = parser_of("serve", __doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--size", type=float, default=1.0, help="share of each workload")
    parser.add_argument("--seed", type=int, default=1, help="of the order of the systems")
    parser.add_argument("--results", type=Path, help="write all figures there, as JSON")
    parser.add_argument("--plots", type=Path, help="write plots into that directory")
    given = parser.parse_args(arguments)
    plan = Plan(given.rounds, given.systems, given.workloads, given.size, given.seed)
    titles = {name: system.title for name, system in SYSTEMS.items()}
    comparison = Comparison(plan)
    began = time.monotonic()
    where = machine.describe()
    print(where, flush=True)
    try:
        with ended_by_sigterm():
            comparison.run()
    except KeyboardInterrupt:
        return 130
    metrics = metrics_of(comparison.rounds, comparison.failures)
    seconds = time.monotonic() - began
    print(f"\nMeasured in {seconds:.0f} s. Medians of {plan.rounds} rounds:\n")
    print(table(comparison.rounds, titles), flush=True)
    if given.results is not None:
        given.results.parent.mkdir(parents=True, exist_ok=True)
        told = {
            "command": ["python", "-m", "benchmarks.serve", *arguments],
            "machine": where,
            "failures": comparison.failures,
            "figures": raw(comparison.rounds),
            "metrics": [json.loads(metric.line()) for metric in metrics],
        }
        given.results.write_text(json.dumps(told, indent=1) + "\n")
    if given.plots is not None:
        try:
            draw(comparison.rounds, titles, given.plots)
        except CannotMeasure as why:
            print(why)
    for metric in metrics:
        print(metric.line())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
