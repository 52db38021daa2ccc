from __future__ import annotations

from benchmarks.replay.prepare import prepare
from benchmarks.replay.trace import Part, TraceRequest

PICTURE = Part(image="cat", tokens=40)


def request(name: str, *parts: Part, answer_tokens: int = 20) -> TraceRequest:
    return TraceRequest(id=name, at=0.0, answer_tokens=answer_tokens, prompt=list(parts))


def test_a_prompt_is_hashed_as_if_nothing_came_behind_it() -> None:
    short, long = prepare(
        [request("r", PICTURE, answer_tokens=1), request("r", PICTURE, answer_tokens=60)], 16
    )
    assert short.prompt == long.prompt
    assert (len(long.prompt.digests), long.prompt.reusable) == (2, 2)
    assert long.prompt.num_tokens == 40
    assert len(long.digests) == 100 // 16


def test_the_last_block_of_a_prompt_that_ends_with_it_is_not_reusable() -> None:
    (whole,) = prepare([request("r", Part(image="cat", tokens=48))], 16)
    assert (len(whole.prompt.digests), whole.prompt.reusable) == (3, 2)


def test_the_next_turn_begins_with_prompt_and_answer() -> None:
    first, second = prepare(
        [
            request("a", PICTURE),
            request("b", PICTURE, Part(answer="a", tokens=20), Part(text="more", tokens=30)),
        ],
        16,
    )
    assert second.digests[:3] == first.digests[:3]


def test_other_pictures_have_other_hashes() -> None:
    cat, dog = prepare([request("a", PICTURE), request("b", Part(image="dog", tokens=40))], 16)
    assert not set(cat.digests) & set(dog.digests)
    assert cat.items[0].identity != dog.items[0].identity


def test_an_engine_gets_a_request_of_its_own_each_time() -> None:
    (prepared,) = prepare([request("a", PICTURE)], 16)
    first, second = prepared.for_engine(), prepared.for_engine()
    assert first is not second
    assert (first.prompt_tokens, first.answer_tokens, first.items) == (40, 20, prepared.items)
