from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers import normalizers as norm
from transformers import PreTrainedTokenizerFast

from frontend.segment_tokenizer import SegmentTokenizer, segment_tokenizer

SPECIAL = ["<|start|>", "<|end|>", "<|image|>"]
CORPUS = ["the quick brown fox jumps over the lazy dog", "def main(): return 1 + 23 # done",
          "ünïcödé 漢字 한국어", "  spaces   and\n\n\tlines \n"] * 20


def trained(
    *,
    normalizer: norm.Normalizer | None = None,
    pre_tokenizer: pre_tokenizers.PreTokenizer | None = None,
    special: tuple[AddedToken | str, ...] = tuple(SPECIAL),
) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZERS = {
    "bytes": trained(),
    "normalizing": trained(normalizer=norm.NFC()),
    "prefix space": trained(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "always prepending": trained(
        pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="always")
    ),
}

texts = st.lists(
    st.sampled_from([*SPECIAL, "<|", "|>", "<|star", "end|>", "the fox", " ", "\n", "1", "é",
                     "e\u0301", "漢"])
    | st.text(max_size=8),
    max_size=30,
).map("".join)


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=40)
@given(texts=st.lists(texts, min_size=1, max_size=4))
def test_token_ids_are_the_tokenizers_own(kind: str, texts: list[str]) -> None:
    tokenizer = TOKENIZERS[kind]
    segments = segment_tokenizer(tokenizer)
    assert segments is not None
    for text in [*texts, *texts, "".join(texts)]:
        expected = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert segments.encode(text) == expected


@pytest.mark.parametrize(
    "tokenizer",
    [
        trained(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first")),
        trained(special=(AddedToken("<|end|>", lstrip=True, special=True),)),
        trained(special=(AddedToken("<|end|>", rstrip=True, special=True),)),
        trained(special=("<|end|>", "<|end|>\n")),
        trained(special=("<|end|>", "|>\n")),
        trained(special=("aa",)),
        trained(special=()),
        object(),
        None,
    ],
    ids=["first prepended", "lstrip", "rstrip", "longer", "overlapping", "with itself",
         "no special tokens", "no tokenizer of that kind", "none"],
)
def test_where_it_is_not_certain_there_is_none(tokenizer: object) -> None:
    assert segment_tokenizer(tokenizer) is None


class Encoding:
    """Encodes to one id per character; keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, texts: list[str]) -> list[list[int]]:
        self.asked += sorted(texts)
        return [[ord(character) for character in text] for text in texts]


def test_only_what_is_new_is_tokenized() -> None:
    encoding = Encoding()
    segments = SegmentTokenizer({"|": -1}, encoding)
    assert segments.encode("a|b|") == [97, -1, 98, -1]
    assert segments.encode("a|b|c|") == [97, -1, 98, -1, 99, -1]
    assert segments.encode("a||b") == [97, -1, -1, 98]
    assert encoding.asked == ["a", "b", "c"]


def test_what_has_not_been_used_for_longest_is_forgotten_first() -> None:
    encoding = Encoding()
    segments = SegmentTokenizer({"|": -1}, encoding, max_characters=600)
    for text in ("a", "b", "a", "c", "a", "b"):
        segments.encode(text)
    assert encoding.asked == ["a", "b", "c", "b"]


def test_one_text_larger_than_all_that_is_kept_is_still_tokenized() -> None:
    segments = SegmentTokenizer({"|": -1}, Encoding(), max_characters=10)
    assert segments.encode("abc") == [97, 98, 99]
