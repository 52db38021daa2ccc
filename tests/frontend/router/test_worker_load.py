"""Charges add up while requests run and leave nothing when they end."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.router.worker_load import LoadBook, WorkerLoad
from transfer.messages import FrontendShare, LoadReport

IDLE = WorkerLoad()


def test_charges_of_one_worker_add_up():
    book = LoadBook()
    book.charge("w", "r1", 100, 4)
    book.charge("w", "r2", 30, 2)
    book.charge("v", "r3", 7, 1)
    assert book.load("w") == WorkerLoad(requests=2, prefill_tokens=130, blocks=6)
    assert book.load("v") == WorkerLoad(requests=1, prefill_tokens=7, blocks=1)


def test_loads_of_several_workers_are_those_of_each():
    book = LoadBook()
    book.charge("w", "r1", 100, 4)
    book.charge("v", "r2", 7, 1)
    workers = ["v", "stranger", "w"]
    for _ in range(2):
        assert book.loads(workers) == [book.load(worker) for worker in workers]
        book.charge("w", "r3", 30, 2)


def test_the_first_token_ends_the_prefill_and_keeps_the_blocks():
    book = LoadBook()
    book.charge("w", "r", 100, 4)
    book.first_token("r")
    book.first_token("r")
    assert book.load("w") == WorkerLoad(requests=1, prefill_tokens=0, blocks=4)


def test_a_request_routed_again_is_charged_once():
    book = LoadBook()
    book.charge("w", "r", 100, 4)
    book.charge("v", "r", 60, 4)
    assert book.load("w") == IDLE
    assert book.load("v") == WorkerLoad(requests=1, prefill_tokens=60, blocks=4)


def test_finishing_twice_takes_away_once():
    book = LoadBook()
    book.charge("w", "r1", 100, 4)
    book.charge("w", "r2", 50, 2)
    book.finish("r1")
    book.finish("r1")
    assert book.load("w") == WorkerLoad(requests=1, prefill_tokens=50, blocks=2)


def test_a_lost_worker_names_its_requests_and_is_idle():
    book = LoadBook()
    for request_id in ("r2", "r1"):
        book.charge("w", request_id, 10, 1)
    book.charge("v", "r3", 10, 1)
    assert book.drop_worker("w") == ["r2", "r1"]
    assert book.drop_worker("w") == []
    book.first_token("r1")
    book.finish("r2")
    assert book.load("w") == IDLE
    assert book.load("v").requests == 1


def report(kv_blocks=0, **shares):
    return LoadReport(epoch="e", seq=0, kv_blocks=kv_blocks, shares=shares)


def test_what_other_frontends_have_in_flight_is_added_to_what_is_ones_own():
    book = LoadBook()
    book.charge("w", "r", 100, 4)
    book.report(
        "w",
        report(
            kv_blocks=50,
            me=FrontendShare(9, 900, 90),
            one=FrontendShare(2, 60, 7),
            two=FrontendShare(1, 5, 3),
        ),
        "me",
    )
    assert book.load("w") == WorkerLoad(4, 165, 14, engine_blocks=50)
    assert book.own("w") == WorkerLoad(1, 100, 4)


def test_two_frontends_agree_on_a_worker_whoever_sent_what():
    mine, theirs = LoadBook(), LoadBook()
    mine.charge("w", "r1", 100, 4)
    mine.charge("w", "r2", 10, 1)
    theirs.charge("w", "r3", 30, 2)
    said = report(kv_blocks=9, a=FrontendShare(2, 110, 5), b=FrontendShare(1, 30, 2))
    mine.report("w", said, "a")
    theirs.report("w", said, "b")
    assert mine.load("w") == theirs.load("w") == WorkerLoad(3, 140, 7, 9)


def test_a_report_replaces_the_one_before():
    book = LoadBook()
    book.report("w", report(other=FrontendShare(2, 60, 7)), "me")
    book.report("w", report(other=FrontendShare(1, 0, 3)), "me")
    assert book.load("w") == WorkerLoad(1, 0, 3)
    book.report("w", report(), "me")
    assert vars(book) == vars(LoadBook())


def test_a_lost_workers_report_is_forgotten():
    book = LoadBook()
    book.report("w", report(other=FrontendShare(2, 60, 7)), "me")
    book.drop_worker("w")
    assert book.load("w") == IDLE


def test_a_request_tells_what_it_is_charged_now():
    book = LoadBook()
    book.charge("w", "r", 100, 4)
    assert book.charged("r") == WorkerLoad(1, 100, 4)
    book.first_token("r")
    assert book.charged("r") == WorkerLoad(1, 0, 4)
    book.finish("r")
    assert book.charged("r") == IDLE


events = st.one_of(
    st.tuples(
        st.just("charge"),
        st.sampled_from("wv"),
        st.sampled_from("rst"),
        st.integers(0, 50),
        st.integers(0, 5),
    ),
    st.tuples(st.sampled_from(["first_token", "finish"]), st.sampled_from("rst")),
    st.tuples(st.just("drop_worker"), st.sampled_from("wv")),
)


@settings(deadline=None)
@given(st.lists(events, max_size=40))
def test_loads_equal_the_sum_over_requests_and_end_at_nothing(happenings):
    book, running = LoadBook(), {}
    for verb, *args in happenings:
        getattr(book, verb)(*args)
        if verb == "charge":
            worker, request_id, tokens, blocks = args
            running[request_id] = (worker, tokens, blocks)
        elif verb == "drop_worker":
            running = {r: c for r, c in running.items() if c[0] != args[0]}
        elif args[0] in running:
            worker, _, blocks = running.pop(args[0])
            if verb == "first_token":
                running[args[0]] = (worker, 0, blocks)
        for worker in "wv":
            mine = [charge for charge in running.values() if charge[0] == worker]
            assert book.load(worker) == WorkerLoad(
                len(mine), sum(c[1] for c in mine), sum(c[2] for c in mine)
            )
    for request_id in "rst":
        book.finish(request_id)
    assert len(book) == 0
    assert vars(book) == vars(LoadBook())
