"""Decisions of the router: exact overlap, spread under bursts, and nothing left behind."""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.router.block_hashes import RequestBlocks
from frontend.router.cost import RouterSettings
from frontend.router.image_affinity import PromptImage
from frontend.router.router import Router
from frontend.router.worker_load import LoadBook
from transfer.messages import FrontendShare, KvSnapshot, LoadReport

BLOCK = 32
EIGHT = [f"w{n}" for n in range(8)]


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def make_router(mode="kv", **settings):
    clock = Clock()
    return Router(mode, RouterSettings(**settings), clock, random.Random(3)), clock


def prompt(name, num_tokens, skips_cache=False):
    digests = [f"{name}-{n}".encode() for n in range(num_tokens // BLOCK)]
    reusable = 0 if skips_cache else (num_tokens - 1) // BLOCK
    return RequestBlocks(digests, reusable, num_tokens, BLOCK)


def route(router, request_id, blocks, candidates=EIGHT, pinned=None):
    return router.route(request_id, blocks, blocks.num_tokens, candidates, pinned)


def test_a_request_goes_where_its_prefix_is():
    router, _ = make_router()
    blocks = prompt("a", 1000)
    router.index.store("w5", blocks.digests[:10])
    taken = route(router, "r", blocks)
    assert taken.worker == "w5"
    assert (taken.overlap_blocks, taken.promised_blocks, taken.prompt_blocks) == (10, 0, 31)
    assert taken.cost == 1000 - 10 * BLOCK
    assert [a.cost for a in taken.alternatives] == [1000.0] * 7
    assert "w5" not in {a.worker for a in taken.alternatives}


def test_the_last_block_of_an_aligned_prompt_is_no_overlap():
    router, _ = make_router()
    blocks = prompt("a", 4 * BLOCK)
    router.index.store("w5", blocks.digests)
    assert route(router, "r", blocks).overlap_blocks == 3


def test_a_request_that_reads_no_cache_has_no_overlap():
    router, _ = make_router()
    router.index.store("w5", prompt("a", 1000).digests)
    assert route(router, "r", prompt("a", 1000, skips_cache=True)).overlap_blocks == 0


def test_promises_steer_but_are_no_overlap():
    router, clock = make_router()
    blocks = prompt("a", 1000)
    first = route(router, "r1", blocks)
    second = route(router, "r2", blocks)
    assert second.worker == first.worker
    assert (second.overlap_blocks, second.promised_blocks) == (0, 31)
    clock.now += 2.5
    third = route(router, "r3", blocks)
    assert third.promised_blocks == 0
    assert third.worker != first.worker


def test_confirmed_blocks_replace_promised_ones():
    router, _ = make_router()
    blocks = prompt("a", 1000)
    first = route(router, "r1", blocks)
    router.index.store(first.worker, blocks.digests[:20])
    second = route(router, "r2", blocks)
    assert (second.overlap_blocks, second.promised_blocks) == (20, 11)


def test_a_burst_of_one_unseen_prompt_goes_to_few_workers():
    router, _ = make_router()
    taken = Counter(route(router, f"r{n}", prompt("a", 4000)).worker for n in range(50))
    assert 2 <= len(taken) <= 6
    assert max(taken.values()) <= 17


def test_a_burst_over_equally_warm_workers_is_spread_evenly():
    router, _ = make_router()
    blocks = prompt("a", 1000)
    for worker in EIGHT:
        router.index.store(worker, blocks.digests)
    taken = Counter(route(router, f"r{n}", blocks).worker for n in range(100))
    assert max(taken.values()) - min(taken[w] for w in EIGHT) <= 1


def test_cold_requests_one_after_the_other_use_all_workers_alike():
    router, _ = make_router()
    taken = Counter()
    for n in range(80):
        taken[route(router, f"r{n}", prompt(f"p{n}", 500)).worker] += 1
        router.finish(f"r{n}")
    assert taken == dict.fromkeys(EIGHT, 10)


def test_a_shared_prefix_does_not_pin_all_load_to_one_worker():
    router, _ = make_router()
    shared = prompt("system", 2000).digests
    router.index.store("w0", shared)
    taken = Counter()
    for n in range(160):
        own = [f"{n}-{block}".encode() for block in range(3)]
        blocks = RequestBlocks([*shared, *own], 65, 2100, BLOCK)
        worker = route(router, f"r{n}", blocks).worker
        router.index.store(worker, blocks.digests)
        router.first_token(f"r{n}")
        taken[worker] += 1
    assert max(taken.values()) <= 1.5 * 160 / 8


def test_work_in_flight_repels_until_it_ends():
    router, _ = make_router()
    busy = route(router, "r1", prompt("a", 4000), ["w0", "w1"]).worker
    idle = ({"w0", "w1"} - {busy}).pop()
    assert route(router, "r2", prompt("b", 1000), ["w0", "w1"]).worker == idle
    router.finish("r1")
    assert route(router, "r3", prompt("c", 100), ["w0", "w1"]).worker == busy


def test_a_first_token_takes_the_prompt_off_the_queue():
    router, _ = make_router()
    blocks = prompt("a", 1000)
    router.index.store("w0", blocks.digests[:10])
    route(router, "r", blocks, ["w0"])
    assert router.load.load("w0").prefill_tokens == 1000 - 10 * BLOCK
    router.first_token("r")
    assert router.load.load("w0").prefill_tokens == 0
    assert router.load.load("w0").blocks == 32


def test_a_pinned_request_follows_its_sibling():
    router, _ = make_router()
    blocks = prompt("a", 1000)
    router.index.store("w5", blocks.digests)
    assert route(router, "r", blocks, pinned="w2").worker == "w2"
    assert router.load.load("w2").requests == 1


def test_a_pin_to_a_worker_that_is_gone_is_ignored():
    router, _ = make_router()
    blocks = prompt("a", 1000)
    router.index.store("w5", blocks.digests)
    assert route(router, "r", blocks, pinned="w9").worker == "w5"


def test_a_request_routed_again_does_not_see_its_own_charge():
    router, _ = make_router()
    router.route("r", None, 1000, ["w0"])
    again = router.route("r", None, 1000, ["w0"])
    assert again.cost == 1000
    assert len(router.load) == 1


def test_only_candidates_are_taken():
    router, _ = make_router()
    blocks = prompt("a", 1000)
    router.index.store("w5", blocks.digests)
    assert route(router, "r", blocks, ["w1"]).worker == "w1"
    with pytest.raises(ValueError, match="no worker"):
        route(router, "r2", blocks, [])
    assert len(router.load) == 1


def test_what_a_request_would_cost_is_told_without_charging_anybody():
    router, _ = make_router()
    blocks = prompt("a", 1000)
    router.index.store("w5", blocks.digests[:10])
    costs = router.costs(blocks, EIGHT)
    assert costs == router.costs(blocks, EIGHT)
    assert costs["w5"] == 1000 - 10 * BLOCK
    assert set(costs) == set(EIGHT)
    assert len(router.load) == 0


def test_a_dropped_worker_leaves_nothing():
    router, _ = make_router()
    blocks = prompt("a", 1000)
    router.plane.on_ready("w0", "e1")
    router.plane.on_snapshot("w0", KvSnapshot("e1", 1, {"GPU": blocks.digests}))
    route(router, "r1", blocks, ["w0"])
    assert router.drop_worker("w0") == ["r1"]
    assert not router.index.sweep(1_000)
    assert len(router.index) == len(router.load) == len(router.promises) == 0
    assert not router.plane.caught_up("w0")


def test_round_robin_takes_turns_and_still_tells_the_overlap():
    router, _ = make_router("round-robin")
    blocks = prompt("a", 1000)
    router.index.store("w1", blocks.digests)
    routes = [route(router, f"r{n}", blocks, ["w0", "w1"]) for n in range(4)]
    assert [r.worker for r in routes] == ["w0", "w1", "w0", "w1"]
    assert [r.overlap_blocks for r in routes] == [0, 31, 0, 31]


def test_random_takes_all_workers_about_alike():
    router, _ = make_router("random")
    taken = Counter(router.route(f"r{n}", None, 100, EIGHT).worker for n in range(800))
    assert set(taken) == set(EIGHT)
    assert max(taken.values()) < 150


def test_least_loaded_ignores_the_caches():
    router, _ = make_router("least-loaded")
    blocks = prompt("a", 1000)
    router.index.store("w1", blocks.digests)
    router.load.charge("w1", "other", 10, 1)
    taken = route(router, "r", blocks, ["w0", "w1"])
    assert (taken.worker, taken.overlap_blocks) == ("w0", 0)
    assert taken.alternatives[0].overlap_blocks == 31


def test_a_temperature_also_takes_dearer_workers():
    router, _ = make_router(temperature=1.0)
    blocks = prompt("a", 1000)
    router.index.store("w0", blocks.digests)
    taken = set()
    for n in range(50):
        taken.add(route(router, f"r{n}", blocks, ["w0", "w1"]).worker)
        router.finish(f"r{n}")
    assert taken == {"w0", "w1"}


def picture(name, num_tokens, image_tokens, text="a"):
    """A prompt of 64 tokens of text, an image, and text again."""
    blocks = prompt(f"{text}-{name}", num_tokens)
    return replace(blocks, images=(PromptImage(name, 64, image_tokens),))


def test_a_burst_of_one_unseen_large_image_goes_to_few_workers():
    router, _ = make_router()
    taken = Counter(
        route(router, f"r{n}", picture("photo", 4300, 4096)).worker for n in range(50)
    )
    assert 2 <= len(taken) <= 5
    # Each encodes it once: the rest of its requests only adds text and waiting.
    assert sum(router.load.load(w).prefill_tokens for w in EIGHT) == len(taken) * (
        4300 + 2048
    ) + (50 - len(taken)) * (4300 - 134 * BLOCK)


@pytest.mark.parametrize("in_flight", [16, 24, 40, 64, 160])
def test_a_prefix_that_everyone_shares_pins_nobody(in_flight):
    """Requests come and go: at each moment nobody has above 1.5 times the mean."""
    router, _ = make_router()
    shared = prompt("system", 2000).digests
    router.index.store("w0", shared)
    running, peaks = deque(), []
    for n in range(10 * in_flight):
        own = [f"{n}-{block}".encode() for block in range(3)]
        blocks = RequestBlocks([*shared, *own], 65, 2100, BLOCK)
        worker = route(router, f"r{n}", blocks).worker
        router.index.store(worker, blocks.digests)
        router.first_token(f"r{n}")
        running.append((f"r{n}", worker))
        if len(running) == in_flight:
            counts = Counter(worker for _, worker in running)
            peaks.append(max(counts.values()))
            router.finish(running.popleft()[0])
    steady = peaks[len(peaks) // 2 :]
    assert max(steady) <= max(math.ceil(1.5 * in_flight / 8), 4)


def test_a_few_blocks_that_all_prompts_begin_with_do_not_fill_one_cache_alone():
    router, _ = make_router()
    taken = Counter()
    for n in range(80):
        blocks = prompt(f"p{n}", 1600)
        blocks.digests[0] = b"template"
        worker = route(router, f"r{n}", blocks).worker
        router.index.store(worker, blocks.digests)
        router.finish(f"r{n}")
        taken[worker] += 1
    assert max(taken.values()) <= 1.5 * 80 / 8


def test_a_long_conversation_stays_where_it_is_though_others_are_idle():
    router, _ = make_router()
    for n in range(4):
        route(router, f"r{n}", prompt(f"other-{n}", 320), ["w3"])
        router.first_token(f"r{n}")
    blocks = prompt("chat", 20_000)
    router.index.store("w3", blocks.digests)
    assert route(router, "r", blocks).worker == "w3"


def test_an_image_goes_where_it_was_encoded_though_its_blocks_are_gone():
    router, clock = make_router()
    first = route(router, "r1", picture("photo", 1300, 1024))
    assert first.cost == 1300 + 512
    router.finish("r1")
    clock.now += 60
    again = route(router, "r2", picture("photo", 1300, 1024, text="another"))
    assert (again.worker, again.overlap_blocks) == (first.worker, 0)
    assert again.cost == 1300
    assert {a.cost for a in again.alternatives} == {1300 + 512}


def test_blocks_count_before_images_where_they_are_worth_more():
    router, _ = make_router()
    blocks = picture("photo", 1300, 1024)
    router.images.add("w1", blocks.images, 0)
    router.index.store("w2", blocks.digests)
    taken = route(router, "r", blocks)
    # 40 blocks are held, image and all: 1300 - 1280 against 1300.
    assert (taken.worker, taken.cost) == ("w2", 20)
    assert taken.alternatives[0][:2] == ("w1", 1300)


def report(**more):
    return LoadReport(**{"epoch": "e1", "seq": 0, **more})


@pytest.mark.parametrize("happening", ["reset", "loss"])
def test_images_are_forgotten_with_the_encoder_cache(happening):
    router, _ = make_router()
    router.on_report("w1", report(encoder_resets=0))
    route(router, "r", picture("photo", 1300, 1024), ["w1"])
    assert len(router.images) == 1
    router.on_report("w1", report(encoder_resets=0))
    assert len(router.images) == 1
    if happening == "reset":
        router.on_report("w1", report(encoder_resets=1))
    else:
        router.drop_worker("w1")
    assert len(router.images) == 0


def test_what_other_frontends_do_repels_too():
    router, _ = make_router()
    router.frontend = "me"
    for worker, busy in (("w0", "me"), ("w1", "other")):
        router.on_report(worker, report(shares={busy: FrontendShare(3, 3000, 100)}))
    assert {route(router, f"r{n}", prompt(f"p{n}", 100)).worker for n in range(16)} == set(
        EIGHT
    ) - {"w1"}


def test_a_report_from_behind_a_lost_delta_asks_for_a_snapshot():
    router, _ = make_router()
    router.plane.on_ready("w0", "e1")
    router.plane.on_snapshot("w0", KvSnapshot("e1", 1, {}))
    assert not router.on_report("w0", report(seq=1))
    assert router.on_report("w0", report(seq=2))


def test_an_engine_that_drops_the_last_match_reuses_one_block_less():
    router, _ = make_router()
    blocks = replace(prompt("a", 1000), last_match_dropped=True)
    first = route(router, "r1", blocks, ["w0"])
    assert (first.overlap_blocks, first.promised_blocks) == (0, 0)
    second = route(router, "r2", blocks, ["w0"])
    assert (second.overlap_blocks, second.promised_blocks) == (0, 30)
    router.index.store("w0", blocks.digests[:10])
    third = route(router, "r3", blocks, ["w0"])
    assert (third.overlap_blocks, third.promised_blocks) == (9, 21)
    router.index.store("w0", blocks.digests)
    assert route(router, "r4", blocks, ["w0"]).overlap_blocks == 30


happenings = st.lists(
    st.tuples(
        st.sampled_from(["route", "route", "first_token", "finish", "drop_worker"]),
        st.integers(0, 9),
        st.sampled_from(EIGHT),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(happenings)
def test_no_request_leaves_a_charge_behind(events):
    router, clock = make_router()
    for verb, number, worker in events:
        if verb == "route":
            route(router, f"r{number}", picture(f"p{number % 3}", 500, 256))
        elif verb == "drop_worker":
            router.drop_worker(worker)
        else:
            getattr(router, verb)(f"r{number}")
    for number in range(10):
        router.finish(f"r{number}")
    clock.now += 10
    assert len(router.load) == len(router.promises) == 0
    assert vars(router.load) == vars(LoadBook())


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="fastest"):
        Router("fastest", RouterSettings(), Clock(), random.Random(0))
