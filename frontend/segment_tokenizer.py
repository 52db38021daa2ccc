"""Tokenizing only what is new in a prompt.

A chat of many turns sends all of them again. Tokenizers cut a text at its special tokens
before anything else and treat what is between them apart, so between two special tokens
the token ids depend on nothing around them: they are kept, by text. Where a tokenizer is
not known to work like that, there is no ``SegmentTokenizer`` for it.
"""

from __future__ import annotations

import json
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

SHORTEST_TEXT = 2048
"""Characters below which there is too little to save."""
_MAX_CHARACTERS = 16 << 20
"""Of kept segments; with their token ids some 50 to 100 MB."""
_SEGMENT_OVERHEAD = 256
"""What a segment costs beside its text, in characters. An estimate."""
_SAMPLES = (
    "", " ", "\n", "a", " a", "a ", "\n\n a b", "1 23", "  ", "é e\u0301", "▁ _a", "한 字",
)

EncodeSegments = Callable[[Sequence[str]], Sequence[Sequence[int]]]


class SegmentTokenizer:
    """Keeps the token ids of text between special tokens. Safe to call from threads."""

    def __init__(
        self,
        special: dict[str, int],
        encode: EncodeSegments,
        max_characters: int = _MAX_CHARACTERS,
    ) -> None:
        """``special``: tokens to cut at, and their ids; ``encode``: of texts without."""
        self._special = special
        self._encode = encode
        # The longest first: of two that start alike, tokenizers take that.
        longest_first = sorted(special, key=len, reverse=True)
        self._cut = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")").split
        self._known: OrderedDict[str, array[int]] = OrderedDict()
        self._max_characters = max_characters
        self._characters = 0
        self._lock = threading.Lock()

    def encode(self, text: str) -> list[int]:
        """The token ids of ``text``, with no special tokens added."""
        pieces = self._cut(text)
        segments = set(pieces[::2]) - {""}
        with self._lock:
            found = {s: self._known[s] for s in segments if s in self._known}
        missing = [segment for segment in segments if segment not in found]
        if missing:
            encoded = zip(missing, self._encode(missing), strict=True)
            found.update({segment: array("i", ids) for segment, ids in encoded})
        self._keep(found)
        ids: list[int] = []
        for index, piece in enumerate(pieces):
            if index % 2:
                ids.append(self._special[piece])
            elif piece:
                ids.extend(found[piece])
        return ids

    def _keep(self, used: dict[str, array[int]]) -> None:
        with self._lock:
            for segment, ids in used.items():
                if segment not in self._known:
                    self._characters += len(segment) + _SEGMENT_OVERHEAD
                self._known[segment] = ids
                self._known.move_to_end(segment)
            while self._characters > self._max_characters:
                segment, _ = self._known.popitem(last=False)
                self._characters -= len(segment) + _SEGMENT_OVERHEAD


def segment_tokenizer(tokenizer: Any) -> SegmentTokenizer | None:
    """One that gives the token ids of ``tokenizer``; None where that is not certain."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    # Position matters to those that treat the first word of a text in another way.
    if '"prepend_scheme":"first"' in _json_of(tokenizer) or tokenizer.split_special_tokens:
        return None
    special = _cutting_tokens(tokenizer)

    def encode(texts: Sequence[str]) -> Sequence[Sequence[int]]:
        ids: Sequence[Sequence[int]] = tokenizer(
            list(texts), add_special_tokens=False, truncation=False
        )["input_ids"]
        return ids

    segments = SegmentTokenizer(special, encode)
    for token in special:
        text = token.join((*_SAMPLES, *reversed(_SAMPLES)))
        if segments.encode(text) != list(encode([text])[0]):
            return None
    return segments if special else None


def _json_of(tokenizer: PreTrainedTokenizerFast) -> str:
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    return json.dumps(
        {key: backend[key] for key in ("normalizer", "pre_tokenizer")}, separators=(",", ":")
    )


def _cutting_tokens(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    """Added tokens that are found wherever they stand, whatever stands around them."""
    added = tokenizer.added_tokens_decoder
    texts = [token.content for token in added.values()]
    return {
        token.content: token_id
        for token_id, token in added.items()
        if token.special
        and not (token.normalized or token.lstrip or token.rstrip or token.single_word)
        and not any(_may_collide(token.content, text) for text in texts)
    }


def _may_collide(token: str, other: str) -> bool:
    """Whether an occurrence of ``other`` can overlap one of ``token``."""
    if token == other:
        # With itself: "aa" in "aaa".
        return any(token[i:] == token[: len(token) - i] for i in range(1, len(token)))
    return (
        token in other
        or other in token
        or any(
            token[-i:] == other[:i] or other[-i:] == token[:i]
            for i in range(1, min(len(token), len(other)))
        )
    )
