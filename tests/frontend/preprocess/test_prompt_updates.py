from __future__ import annotations

import pytest
import torch
from vllm.multimodal.processing.processor import (
    PromptIndexTargets,
    PromptUpdateDetails,
    ResolvedPromptUpdate,
    UpdateMode,
)

from frontend.preprocess.messages import PromptUpdate
from frontend.preprocess.prompt_updates import NotPlain, from_plain, to_plain
from transfer.errors import BadMessage


def update(
    target: object = None, content: PromptUpdateDetails | None = None
) -> ResolvedPromptUpdate:
    return ResolvedPromptUpdate(
        modality="image",
        item_idx=0,
        mode=UpdateMode.INSERT,
        target=[5] if target is None else target,  # type: ignore[arg-type]
        content=content or PromptUpdateDetails.from_seq([1, 2, 2, 3]),
    )


def test_tokens_arrive_as_they_were() -> None:
    before = update()
    after = from_plain(to_plain(before))
    assert after == before
    assert after.content == before.content


def test_which_tokens_are_embeddings_arrives() -> None:
    content = PromptUpdateDetails.select_token_ids([1, 2, 2, 3], [2, 3])
    after = from_plain(to_plain(update(content=content)))
    assert after.content.is_embed is not None
    assert after.content.is_embed([1, 2, 2, 3]).tolist() == [False, True, True, True]


def test_a_token_that_is_an_embedding_only_in_places_does_not_travel() -> None:
    mask = torch.tensor([False, True, False, False])
    content = PromptUpdateDetails([1, 2, 2, 3], is_embed=lambda full: mask)
    with pytest.raises(NotPlain):
        to_plain(update(content=content))


@pytest.mark.parametrize("place", [PromptIndexTargets.start(), PromptIndexTargets.end()])
def test_the_ends_of_a_prompt_arrive(place: object) -> None:
    after = from_plain(to_plain(update(place))).target
    for prompt in ([], [1], [1, 2, 3]):
        expected = place.get_match_index(prompt, 0)  # type: ignore[attr-defined]
        assert after.get_match_index(prompt, 0) == expected  # type: ignore[union-attr]


def test_a_computed_place_does_not_travel() -> None:
    with pytest.raises(NotPlain):
        to_plain(update(PromptIndexTargets.prefix([1, 2])))


@pytest.mark.parametrize(
    "message",
    [
        PromptUpdate("image", "insert", "middle", [1], None),
        PromptUpdate("image", "remove", [1], [1], None),
    ],
)
def test_what_cannot_have_been_sent_is_refused(message: PromptUpdate) -> None:
    with pytest.raises(BadMessage):
        from_plain(message)
