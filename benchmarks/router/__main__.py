"""``python -m benchmarks.router [SECTION ...]``: what routing costs the frontend.

Sections, all by default: ``index`` (look-ups, ingestion and memory with a million resident
blocks, beside the Rust RadixTree of ai-dynamo-runtime), ``decision`` (hashing a prompt and
choosing a worker).

All times are processor time: nothing measured here waits, and so a busy machine distorts
it least.
"""

import sys

from benchmarks.runner import Section, chosen_sections, prepare_for_vllm, run


def main() -> int:
    names = chosen_sections("router", __doc__, ("index", "decision"))
    prepare_for_vllm()

    from benchmarks.router import decision, index

    sections = (
        Section("index", index.PROMISED, index.measure),
        Section("decision", decision.PROMISED, decision.measure),
    )
    return run([section for section in sections if section.name in names])


if __name__ == "__main__":
    sys.exit(main())
