"""YAML that knows where its keys stand."""

from __future__ import annotations

import pytest

from configs.deployment.positions import BadYaml, dotted, read_yaml

TEXT = """\
# a comment
model: m

workers:
  - count: 1
    options: {a: 1,
              b: 2}
  - count: 2
"""


def test_each_key_has_its_line() -> None:
    document = read_yaml(TEXT)
    assert document.values["workers"][1] == {"count": 2}
    assert document.lines[("model",)] == 2
    assert document.lines[("workers", 0, "options", "b")] == 7
    assert document.lines[("workers", 1)] == 8


def test_what_the_file_has_not_stands_where_it_would() -> None:
    document = read_yaml(TEXT)
    assert document.line_of(("workers", 1, "gpus")) == 8
    assert document.line_of(("http", "port")) == 1


@pytest.mark.parametrize(
    "text, line, words",
    [
        ("a: 1\nb: [1,\nc: 2\n", 4, "expected"),
        ("a: 1\n\na: 2\n", 3, "a stands on line 1 already"),
        ("- a\n", 1, "a deployment is a mapping"),
        ("", 1, "a deployment is a mapping"),
        ("a: 1\n? [x]\n: 2\n", 2, ""),
        ("a: \x00\n", 1, ""),
        ("a: !!python/object/apply:os.system [x]\n", 1, "could not determine"),
    ],
)
def test_what_is_no_file_of_ours_is_refused_with_a_line(
    text: str, line: int, words: str
) -> None:
    with pytest.raises(BadYaml) as refusal:
        read_yaml(text)
    assert refusal.value.problem.line == line
    assert words in refusal.value.problem.text


def test_a_path_is_written_with_dots() -> None:
    assert dotted(("workers", 0, "count")) == "workers.0.count"
