from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.mock.cost_model import step_seconds
from workers.mock.engine import (
    EncoderItem,
    EngineLimits,
    MockEngine,
    MockRequest,
    StepOutputs,
)

BLOCK = 16


def limits(
    num_blocks: int = 100, tokens: int = 64, seqs: int = 8, encoder: int = 64
) -> EngineLimits:
    return EngineLimits(num_blocks, BLOCK, seqs, tokens, encoder)


def request(
    name: str,
    prompt: int = 40,
    answer: int = 3,
    *,
    content: str | None = None,
    items: Sequence[EncoderItem] = (),
    reads_cache: bool = True,
) -> MockRequest:
    """Requests of one ``content`` begin with the same blocks."""
    digests = [
        f"{content or name} {n}".encode() for n in range((prompt + answer) // BLOCK)
    ]
    return MockRequest(name, prompt, answer, digests, tuple(items), reads_cache)


def step(engine: MockEngine, now: float = 0.0) -> tuple[float, StepOutputs]:
    ends = engine.begin(now)
    assert ends is not None
    return ends, engine.finish(ends)


def run(engine: MockEngine, now: float = 0.0, max_steps: int = 1) -> dict[str, list[float]]:
    """Compute all there is; returns when each token of each request came."""
    times: dict[str, list[float]] = {}
    while (ends := engine.begin(now, max_steps)) is not None:
        now = ends
        for token in engine.finish(now).tokens:
            came = times.setdefault(token.request.request_id, [])
            came += [now] * token.new_tokens
    return times


def test_an_idle_engine_has_nothing_to_do() -> None:
    engine = MockEngine(limits())
    assert engine.idle
    assert engine.begin(5.0) is None


def test_a_prompt_takes_a_step_and_every_further_token_another() -> None:
    engine = MockEngine(limits())
    engine.add(request("r", prompt=40, answer=3))
    # 8 ms + 40 * 80 us; then 8 ms + 80 us + 29 ns for each of 41 and of 42 tokens.
    first = 10.0 + 0.008 + 0.0032
    second = first + 0.00808 + 41 * 29e-9
    third = second + 0.00808 + 42 * 29e-9
    assert run(engine, now=10.0)["r"] == pytest.approx([first, second, third], abs=1e-12)
    assert engine.idle
    assert engine.pool.num_unused == 100


def test_a_long_prompt_is_computed_in_chunks_beside_answers() -> None:
    engine = MockEngine(limits(tokens=64))
    engine.add(request("answering", prompt=30, answer=9))
    now, _ = step(engine)
    engine.add(request("long", prompt=100, answer=1))
    # One token of the answer, so 63 of the prompt fit into the first step, 37 are left.
    ends, outputs = step(engine, now)
    assert ends - now == pytest.approx(step_seconds(63, 0, 1, 31))
    assert [token.request.request_id for token in outputs.tokens] == ["answering"]
    now = ends
    ends, outputs = step(engine, now)
    assert ends - now == pytest.approx(step_seconds(37, 0, 1, 32))
    assert [token.request.request_id for token in outputs.tokens] == ["answering", "long"]
    assert [token.first for token in outputs.tokens] == [False, True]
    assert [token.finished for token in outputs.tokens] == [False, True]


def test_a_known_prefix_is_not_computed_again() -> None:
    engine = MockEngine(limits())
    engine.add(request("first", prompt=50, content="same"))
    run(engine)
    again = request("again", prompt=50, content="same")
    engine.add(again)
    ends, _ = step(engine)
    assert again.cached_tokens == 48
    assert ends == pytest.approx(step_seconds(2, 0, 0, 0))


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    engine = MockEngine(limits())
    engine.add(request("first", prompt=48, content="same"))
    run(engine)
    again = request("again", prompt=48, content="same")
    engine.add(again)
    ends, _ = step(engine)
    assert again.cached_tokens == 32
    assert ends == pytest.approx(step_seconds(16, 0, 0, 0))


def test_a_request_behind_in_one_batch_finds_what_is_being_computed() -> None:
    engine = MockEngine(limits(tokens=200))
    first, second = (request(name, prompt=50, content="same") for name in ("a", "b"))
    engine.add(first)
    engine.add(second)
    ends, _ = step(engine)
    assert (first.cached_tokens, second.cached_tokens) == (0, 48)
    assert ends == pytest.approx(step_seconds(52, 0, 0, 0))


def test_answers_can_be_found_too() -> None:
    engine = MockEngine(limits())
    # 30 + 20 tokens, of which the last is never computed: 49 // 16 blocks.
    engine.add(request("turn-1", prompt=30, answer=20, content="chat"))
    run(engine)
    turn = request("turn-2", prompt=60, content="chat")
    engine.add(turn)
    step(engine)
    assert turn.cached_tokens == 48


def test_a_request_that_must_not_read_the_cache_does_not() -> None:
    engine = MockEngine(limits())
    engine.add(request("first", prompt=50, content="same"))
    run(engine)
    whole = request("whole", prompt=50, content="same", reads_cache=False)
    engine.add(whole)
    step(engine)
    assert whole.cached_tokens == 0


def test_no_more_requests_run_than_are_allowed() -> None:
    engine = MockEngine(limits(seqs=2))
    for name in "abc":
        engine.add(request(name, prompt=10))
    step(engine)
    assert list(engine.running) == ["a", "b"]
    assert [waiting.request_id for waiting in engine.waiting] == ["c"]


def test_a_request_waits_until_there_are_blocks_for_it() -> None:
    engine = MockEngine(limits(num_blocks=4))
    engine.add(request("a", prompt=40, answer=3))
    engine.add(request("b", prompt=24, answer=2))
    step(engine)
    assert list(engine.running) == ["a"]
    run(engine)
    assert engine.idle
    assert engine.preemptions == 0


def test_when_blocks_run_out_the_last_request_starts_anew() -> None:
    engine = MockEngine(limits(num_blocks=4))
    first, last = request("first", prompt=31, answer=6), request("last", prompt=31, answer=6)
    engine.add(first)
    engine.add(last)
    times = run(engine)
    assert engine.preemptions == 1
    assert len(times["first"]) == len(times["last"]) == 6
    assert times["first"][-1] < times["last"][-1]
    # What it is told about reuse is what it found at first.
    assert last.cached_tokens == 0
    assert engine.pool.num_unused == 4


def test_what_can_never_be_computed_is_refused() -> None:
    engine = MockEngine(limits(num_blocks=4, encoder=64))
    with pytest.raises(ValueError, match="KV cache"):
        engine.add(request("r", prompt=60, answer=5))
    with pytest.raises(ValueError, match="encoder cache"):
        engine.add(request("r", prompt=40, items=[EncoderItem("cat", 0, 65)]))
    with pytest.raises(ValueError):
        engine.add(request("r", answer=0))
    assert engine.idle


def test_an_image_is_encoded_once() -> None:
    engine = MockEngine(limits(tokens=200))
    engine.add(request("a", prompt=50, items=[EncoderItem("cat", 4, 32)]))
    engine.add(request("b", prompt=50, items=[EncoderItem("cat", 4, 32)]))
    ends, _ = step(engine)
    assert ends == pytest.approx(step_seconds(100, 32, 0, 0))


def test_an_image_whose_blocks_are_cached_is_not_encoded() -> None:
    engine = MockEngine(limits())
    items = [EncoderItem("cat", 4, 30)]
    engine.add(request("a", prompt=50, content="same", items=items))
    run(engine)
    engine.encoder_cache.reset()
    engine.add(request("b", prompt=50, content="same", items=items))
    ends, _ = step(engine)
    assert ends == pytest.approx(step_seconds(2, 0, 0, 0))


def test_a_chunk_ends_before_an_image_that_cannot_be_encoded_yet() -> None:
    engine = MockEngine(limits(tokens=200, encoder=40))
    items = [EncoderItem("cat", 4, 32), EncoderItem("dog", 40, 32)]
    engine.add(request("r", prompt=100, items=items, answer=1))
    ends, outputs = step(engine)
    assert ends == pytest.approx(step_seconds(40, 32, 0, 0))
    assert outputs.tokens == []
    # The first one is needed no more and makes room.
    later, outputs = step(engine, ends)
    assert later - ends == pytest.approx(step_seconds(60, 32, 0, 0))
    assert outputs.tokens[0].finished


def test_what_is_stored_is_told_with_the_step() -> None:
    engine = MockEngine(limits(tokens=32))
    engine.add(request("r", prompt=50, answer=1))
    told = [event.digests for _ in range(2) for event in step(engine)[1].events]
    assert told == [[b"r 0", b"r 1"], [b"r 2"]]


def test_an_aborted_request_gives_its_blocks_back() -> None:
    engine = MockEngine(limits(seqs=1))
    engine.add(request("running", prompt=50, items=[EncoderItem("cat", 0, 16)]))
    engine.add(request("waiting"))
    ends = engine.begin(0.0)
    assert ends is not None
    engine.abort(["running", "waiting", "unknown"])
    assert engine.finish(ends).tokens == []
    assert engine.idle
    assert engine.pool.num_unused == 100
    assert engine.encoder_cache.has_room(64)


def test_a_step_is_finished_before_the_next_begins() -> None:
    engine = MockEngine(limits())
    with pytest.raises(RuntimeError):
        engine.finish(0.0)
    engine.add(request("r"))
    engine.begin(0.0)
    assert engine.in_step
    with pytest.raises(RuntimeError):
        engine.begin(0.0)


def test_steps_taken_together_can_be_cut_short_where_one_ends() -> None:
    engine = MockEngine(limits())
    engine.add(request("r", prompt=40, answer=10))
    first, _ = step(engine)
    ends = engine.begin(first, max_steps=100)
    seconds = [0.00808 + n * 29e-9 for n in range(41, 50)]
    assert ends == pytest.approx(first + sum(seconds), abs=1e-9)
    boundary = engine.boundary(first + 0.020)
    assert boundary == pytest.approx(first + sum(seconds[:3]), abs=1e-9)
    (token,) = engine.finish(boundary).tokens
    assert (token.new_tokens, token.finished) == (3, False)
    (token,) = engine.finish(engine.begin(boundary, max_steps=100) or 0.0).tokens
    assert (token.new_tokens, token.finished) == (6, True)


arrivals = st.lists(
    st.tuples(st.integers(1, 70), st.integers(1, 40), st.sampled_from("xyz")),
    min_size=1,
    max_size=6,
)


@given(arrivals, st.integers(7, 40))
def test_steps_taken_together_give_what_single_ones_give(
    drawn: list[tuple[int, int, str]], num_blocks: int
) -> None:
    ends: list[dict[str, float]] = []
    for max_steps in (1, 1000):
        engine = MockEngine(limits(num_blocks=num_blocks, seqs=4))
        for number, (prompt, answer, content) in enumerate(drawn):
            engine.add(request(str(number), prompt, answer, content=content))
        times = run(engine, max_steps=max_steps)
        assert {name: len(came) for name, came in times.items()} == {
            str(number): answer for number, (_, answer, _) in enumerate(drawn)
        }
        assert engine.pool.num_unused == num_blocks
        ends.append({name: came[-1] for name, came in times.items()})
    assert ends[0] == pytest.approx(ends[1], abs=1e-6)
