"""vLLM's prompt updates as plain token ids, and back.

vLLM describes what an image does to the prompt with objects that hold functions. They
are evaluated in the process that made them and sent as what they came to.

vLLM names relied on: multimodal.processing.processor.ResolvedPromptUpdate,
PromptUpdateDetails, PromptIndexTargets, PromptIndex.get_match_index, UpdateMode.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm.multimodal.processing.processor import (
    PromptIndexTargets,
    PromptUpdateDetails,
    ResolvedPromptUpdate,
    UpdateMode,
)

from frontend.preprocess.messages import PromptUpdate
from transfer.errors import BadMessage

START, END = "start", "end"


class NotPlain(ValueError):
    """A prompt update that depends on more than token ids."""


def to_plain(update: ResolvedPromptUpdate) -> PromptUpdate:
    """Raises: NotPlain: token ids alone do not say what it does."""
    content = update.content.full
    return PromptUpdate(
        modality=update.modality,
        mode=update.mode.value,
        target=_plain_target(update),
        content=[int(token) for token in content],
        embedded=_embedded_tokens(update.content),
    )


def from_plain(update: PromptUpdate) -> ResolvedPromptUpdate:
    """Raises: BadMessage: it is not what ``to_plain`` makes."""
    target: object = update.target
    if update.target == START:
        target = PromptIndexTargets.start()
    elif update.target == END:
        target = PromptIndexTargets.end()
    elif isinstance(update.target, str):
        raise BadMessage(f"no place in a prompt is called {update.target!r}")
    if update.embedded is None:
        content = PromptUpdateDetails.from_seq(update.content)
    else:
        content = PromptUpdateDetails.select_token_ids(update.content, update.embedded)
    try:
        mode = UpdateMode(update.mode)
    except ValueError as error:
        raise BadMessage(str(error)) from error
    return ResolvedPromptUpdate(
        modality=update.modality,
        item_idx=0,  # vLLM sets it anew for every request
        mode=mode,
        target=target,  # type: ignore[arg-type]
        content=content,
    )


def _plain_target(update: ResolvedPromptUpdate) -> list[int] | str:
    if isinstance(update.target, list):
        return [int(token) for token in update.target]
    # A function from a prompt to an index. Two prompts tell the start from the end; what
    # finds neither looks for certain tokens first.
    found = [update.target.get_match_index(prompt, 0) for prompt in ([-1], [-1, -1])]
    if found == [0, 0]:
        return START
    if found == [1, 2]:
        return END
    raise NotPlain(f"the place of a prompt update of {update.modality} is computed")


def _embedded_tokens(content: PromptUpdateDetails) -> list[int] | None:
    if content.is_embed is None:
        return None
    mask: Sequence[bool] = content.is_embed(content.full).tolist()
    chosen = {int(t) for t, is_in in zip(content.full, mask, strict=True) if is_in}
    others = {int(t) for t, is_in in zip(content.full, mask, strict=True) if not is_in}
    if chosen & others:
        raise NotPlain("the same token stands for an embedding in one place, not in another")
    return sorted(chosen)
