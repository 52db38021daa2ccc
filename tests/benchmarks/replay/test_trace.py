from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.replay.trace import (
    IMAGE_TOKEN,
    BadTrace,
    Part,
    TraceRequest,
    answer_tokens_of,
    images_of,
    read_trace,
    tokens_of,
    write_trace,
)

FIRST = TraceRequest(
    id="one",
    at=0.5,
    answer_tokens=8,
    prompt=[Part(text="rules", tokens=10), Part(image="cat", tokens=4)],
)
SECOND = TraceRequest(
    id="two",
    after="one",
    delay=1.5,
    answer_tokens=2,
    prompt=[*FIRST.prompt, Part(answer="one", tokens=8), Part(text="more", tokens=3)],
)


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, [FIRST, SECOND])
    assert read_trace(path) == [FIRST, SECOND]
    first_line = path.read_text().splitlines()[0]
    assert first_line == (
        '{"id":"one","at":0.5,"answer_tokens":8,'
        '"prompt":[{"tokens":10,"text":"rules"},{"tokens":4,"image":"cat"}]}'
    )


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("nonsense", "line 1"),
        ('{"id":"a","answer_tokens":1,"prompt":[{"tokens":1,"text":"x"}]}', "at a time"),
        ('{"id":"a","at":1,"answer_tokens":1,"prompt":[]}', "has a prompt"),
        ('{"id":"a","at":1,"answer_tokens":1,"prompt":[{"tokens":1}]}', "a part is"),
        ('{"id":"a","at":1,"answer_tokens":1,"prompt":[{"tokens":0,"text":"x"}]}', "a part"),
        ('{"id":"a","at":1,"answer_tokens":1,"prompt":[],"more":1}', "more"),
        (
            '{"id":"a","after":"b","answer_tokens":1,"prompt":[{"tokens":1,"text":"x"}]}',
            "b is not before it",
        ),
    ],
)
def test_a_line_that_makes_no_sense_is_named(tmp_path: Path, line: str, why: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(BadTrace, match=why):
        read_trace(path)


def test_an_id_comes_once(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, [FIRST, FIRST])
    with pytest.raises(BadTrace, match="comes twice"):
        read_trace(path)


def test_parts_of_one_name_are_the_same_tokens() -> None:
    prompt = tokens_of(SECOND.prompt)
    assert len(prompt) == SECOND.prompt_tokens == 25
    assert prompt[:14] == tokens_of(FIRST.prompt)
    assert prompt[10:14] == [IMAGE_TOKEN] * 4
    assert prompt[14:22] == answer_tokens_of(FIRST)
    assert tokens_of([Part(text="rules", tokens=10)]) != tokens_of(
        [Part(text="other", tokens=10)]
    )


def test_images_are_found_where_they_are() -> None:
    parts = [
        Part(image="cat", tokens=4), Part(text="and", tokens=2), Part(image="dog", tokens=8)
    ]
    assert list(images_of(parts)) == [("cat", 0, 4), ("dog", 6, 8)]
