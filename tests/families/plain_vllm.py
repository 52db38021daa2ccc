"""What plain vLLM answers, one family after another in one process.

    python -m tests.families.plain_vllm CHECKPOINTS ANSWERS NAME ...

writes ANSWERS/NAME.json: answers by question, or ``{"error": ...}`` where vLLM fails.
Importing vLLM takes longer than all else, so a server for each family would not do.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.families.questions import all_questions
from tests.families.table import FAMILIES, Family

LOGPROBS = 2


def answers(family: Family, checkpoint: Path) -> dict[str, Any]:
    """Ask a new engine everything; answers are by the question's key."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = None
    try:
        llm = LLM(
            model=str(checkpoint), dtype="float32", block_size=32, enforce_eager=True,
            max_model_len=8192, distributed_executor_backend="uni",
            mm_processor_cache_gb=0, trust_remote_code=family.own_code, **family.engine,
        )
        params = SamplingParams(
            max_tokens=6, temperature=0, ignore_eos=True, logprobs=LOGPROBS
        )
        # One by one, as the matrix asks: vLLM's CPU build computes the states of hybrid
        # models otherwise when prompts share a step, or are cut into other steps.
        return {
            question.key: _plain(
                llm.chat(question.body["messages"], params, use_tqdm=False)[0]
            )
            for question in all_questions(family)
        }
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def _plain(answer: Any) -> dict[str, Any]:
    [completion] = answer.outputs
    return {
        "prompt_tokens": len(answer.prompt_token_ids),
        "token_ids": list(completion.token_ids),
        "logprobs": [
            [step[token].logprob, *sorted(each.logprob for each in step.values())]
            for token, step in zip(completion.token_ids, completion.logprobs, strict=True)
        ],
    }


def main() -> None:
    checkpoints, target, *names = sys.argv[1:]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name in names:
        family = FAMILIES[name]
        try:
            found = answers(family, Path(checkpoints, name))
        except Exception as error:
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        partial = Path(target, f".{name}.json")
        partial.write_text(json.dumps(found))
        partial.rename(Path(target, f"{name}.json"))


if __name__ == "__main__":
    main()
