"""Traces: who asks what and when. JSON lines, one request a line.

    {"id": "photos-7", "at": 0.25, "answer_tokens": 64, "prompt": [
        {"text": "shop rules", "tokens": 200}, {"image": "photo-93", "tokens": 1024},
        {"text": "question 7", "tokens": 40}]}
    {"id": "photos-7b", "after": "photos-7", "delay": 4.0, "answer_tokens": 32, "prompt": [
        ..., {"answer": "photos-7", "tokens": 64}, {"text": "question 7b", "tokens": 20}]}

``at`` is when a request arrives, in seconds from the start. Or it comes ``delay`` seconds
after the request ``after`` has been answered, as the next turn of a conversation does.
A prompt is a list of parts; parts of one name and length are the same tokens, an ``image``
is that many placeholder tokens with an identity, and ``answer`` is what that request was
answered with.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

TEXT_TOKENS = range(1000, 50_000)
IMAGE_TOKEN = 151_655
"""Qwen-VL's placeholder."""


class BadTrace(ValueError):
    """A trace that cannot be replayed; the text names the request."""


class Part(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A part of a prompt, ``tokens`` long: exactly one of the three names is given."""

    tokens: int
    text: str | None = None
    image: str | None = None
    answer: str | None = None

    def __post_init__(self) -> None:
        names = [name for name in (self.text, self.image, self.answer) if name is not None]
        if len(names) != 1 or self.tokens < 1:
            raise ValueError("a part is a text, an image or an answer of at least a token")


class TraceRequest(
    msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True
):
    """One line of a trace."""

    id: str
    at: float | None = None
    after: str | None = None
    delay: float = 0.0
    answer_tokens: int
    prompt: list[Part]

    def __post_init__(self) -> None:
        if (self.at is None) == (self.after is None):
            raise ValueError("a request comes at a time, or after another")
        if self.answer_tokens < 1 or not self.prompt or self.delay < 0:
            raise ValueError("a request has a prompt, an answer, and no negative delay")

    @property
    def prompt_tokens(self) -> int:
        return sum(part.tokens for part in self.prompt)


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(TraceRequest)


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> None:
    path.write_bytes(b"".join(_encoder.encode(request) + b"\n" for request in requests))


def read_trace(path: Path) -> list[TraceRequest]:
    """Return the requests of a trace file, in its order.

    Raises:
        BadTrace: a line is not a request, or follows one that does not come before it.
    """
    requests: list[TraceRequest] = []
    known: set[str] = set()
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            request = _decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise BadTrace(f"{path.name}, line {number}: {error}") from error
        if request.id in known:
            raise BadTrace(f"{path.name}, line {number}: {request.id} comes twice")
        if request.after is not None and request.after not in known:
            raise BadTrace(f"{path.name}, line {number}: {request.after} is not before it")
        known.add(request.id)
        requests.append(request)
    return requests


def tokens_of(parts: Sequence[Part]) -> list[int]:
    """Return the token ids of a prompt."""
    return [token for part in parts for token in _tokens_of(part)]


def answer_tokens_of(request: TraceRequest) -> list[int]:
    """Return the token ids that ``request`` is answered with."""
    return _tokens_of(Part(tokens=request.answer_tokens, answer=request.id))


def images_of(parts: Sequence[Part]) -> Iterator[tuple[str, int, int]]:
    """Yield identity, offset and length of each image of a prompt, in tokens."""
    offset = 0
    for part in parts:
        if part.image is not None:
            yield part.image, offset, part.tokens
        offset += part.tokens


def _tokens_of(part: Part) -> list[int]:
    if part.image is not None:
        return [IMAGE_TOKEN] * part.tokens
    kind, name = ("text", part.text) if part.text is not None else ("answer", part.answer)
    return random.Random(f"{kind} {name}").choices(TEXT_TOKENS, k=part.tokens)
