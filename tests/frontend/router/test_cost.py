"""The cost formula against figures computed by hand, and the choice made from costs."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from frontend.router.cost import Candidate, RouterSettings, Work, choose, costs_of
from frontend.router.worker_load import WorkerLoad

IDLE = WorkerLoad()
PLAIN = RouterSettings()


def cost(
    num_tokens=1000, overlap=0, promised=0, load=IDLE, settings=PLAIN,
    image_tokens=0, queued_image_tokens=0, **more,
):
    work = Work(overlap, promised, image_tokens, queued_image_tokens)
    return costs_of(num_tokens, [work], [load], 32, settings, **more)[0]


def test_an_idle_worker_without_the_prefix_computes_the_whole_prompt():
    assert cost(1000) == 1000


def test_blocks_held_are_not_computed_again():
    assert cost(1000, overlap=10) == 1000 - 10 * 32


def test_the_credit_says_how_much_a_held_block_counts():
    assert cost(1000, overlap=10, settings=RouterSettings(overlap_score_credit=0.5)) == 840
    assert cost(1000, overlap=10, settings=RouterSettings(overlap_score_credit=0.0)) == 1000


def test_credit_never_makes_a_prompt_cheaper_than_nothing():
    assert cost(1000, overlap=31, settings=RouterSettings(overlap_score_credit=2.0)) == 0


def test_a_few_blocks_of_a_long_prompt_are_no_reason():
    assert cost(1000, overlap=1) == 1000
    assert cost(1000, overlap=2) == 1000 - 64
    assert cost(600, overlap=1) == 600 - 32


def test_queued_prefill_and_held_blocks_are_added():
    load = WorkerLoad(requests=2, prefill_tokens=500, blocks=100)
    assert cost(1000, load=load) == pytest.approx(1000 + 500 + 100 * 32 * 0.1)


def test_the_prefill_scale_weighs_the_request_and_not_the_queue():
    load = WorkerLoad(requests=1, prefill_tokens=500, blocks=0)
    doubled = RouterSettings(prefill_load_scale=2.0)
    assert cost(1000, overlap=10, load=load, settings=doubled) == 2 * 680 + 500


def test_promised_tokens_are_neither_computed_nor_waited_for():
    load = WorkerLoad(requests=1, prefill_tokens=1000, blocks=32)
    assert cost(1000, promised=31, load=load) == pytest.approx(
        (1000 - 992) + (1000 - 992) + 32 * 32 * 0.1
    )


def test_a_promise_takes_no_more_out_of_the_queue_than_is_there():
    assert cost(1000, promised=10, load=WorkerLoad(1, 100, 0)) == 680


def test_blocks_held_are_the_engines_count_where_that_is_more():
    assert cost(load=WorkerLoad(1, 0, 100, engine_blocks=150)) == pytest.approx(1000 + 480)
    assert cost(load=WorkerLoad(1, 0, 100, engine_blocks=50)) == pytest.approx(1000 + 320)


def test_images_to_be_encoded_are_added_by_their_tokens():
    assert cost(1000, image_tokens=600) == 1000 + 0.5 * 600
    double = RouterSettings(encoder_load_scale=2.0, prefill_load_scale=3.0)
    assert cost(1000, image_tokens=600, settings=double) == 3 * (1000 + 2 * 600)
    nothing = RouterSettings(encoder_load_scale=0.0)
    assert cost(1000, image_tokens=600, settings=nothing) == 1000


def test_images_count_apart_from_blocks():
    # The blocks are gone, the image is not: only the prompt is computed again.
    assert cost(1000, overlap=0, image_tokens=0) == 1000
    # The blocks of the text before it are there, the image is not.
    assert cost(1000, overlap=10, image_tokens=600) == 1000 - 320 + 300


def test_an_image_that_is_being_encoded_there_is_not_waited_for_twice():
    # Queued: 1,000 tokens and 600 of an image, for an earlier request with this prefix.
    load = WorkerLoad(requests=1, prefill_tokens=1300, blocks=32)
    assert cost(1000, promised=31, load=load, queued_image_tokens=600) == pytest.approx(
        (1000 - 992) + (1300 - 992 - 300) + 32 * 32 * 0.1
    )


def test_a_crowd_makes_a_worker_with_the_prefix_dearer():
    load = WorkerLoad(requests=9)
    # Ten with this one, 1.5 * 4 = 6 are even enough: 4 too many.
    assert cost(1000, overlap=10, load=load, mean_requests=4) == 680 + 4 * 512


def test_a_few_requests_are_no_crowd_however_idle_the_others_are():
    assert cost(1000, overlap=10, load=WorkerLoad(requests=3), mean_requests=0.5) == 680
    assert cost(1000, overlap=10, load=WorkerLoad(requests=4), mean_requests=0.6) == 680 + 512


def test_those_who_follow_what_is_still_computed_are_a_crowd_earlier():
    load = WorkerLoad(requests=4, prefill_tokens=1000)
    # Five with this one, 1.5 * 2 = 3 are even enough; 320 tokens of the queue are its own.
    assert cost(1000, promised=10, load=load, mean_requests=2) == 680 + 680 + 2 * 1536
    # Of four with this one, three are few.
    three = WorkerLoad(requests=3, prefill_tokens=320)
    assert cost(1000, overlap=5, promised=10, load=three, mean_requests=1) == 520 + 1536


def test_a_crowd_that_no_cached_block_has_drawn_is_only_load():
    assert cost(1000, load=WorkerLoad(requests=9), mean_requests=1) == 1000


def test_the_example_in_the_documentation():
    a = WorkerLoad(requests=2, prefill_tokens=900, blocks=250)
    assert cost(1300, overlap=40, load=a, mean_requests=1) == 1720
    assert cost(1300, overlap=40, load=a._replace(prefill_tokens=0), mean_requests=1) == 820
    assert cost(1300) == 1300
    assert cost(1300, image_tokens=1024) == 1812


def candidates(*costs):
    return [Candidate(f"w{n}", float(cost)) for n, cost in enumerate(costs)]


def test_the_lowest_cost_wins():
    choice = choose(candidates(3, 1, 2), 0.0, random.Random(0), rotation=5)
    assert (choice.candidate.worker, choice.tied) == ("w1", 0)


def test_ties_rotate_over_the_cheapest_only():
    tied = candidates(1, 9, 1, 1)
    taken = [choose(tied, 0.0, random.Random(0), n).candidate.worker for n in range(6)]
    assert taken == ["w0", "w2", "w3", "w0", "w2", "w3"]
    assert choose(tied, 0.0, random.Random(0), 0).tied == 2


def test_a_temperature_draws_by_softmax_of_costs_over_their_spread():
    rng = random.Random(1)
    drawn = Counter(
        choose(candidates(0, 50, 100), 0.5, rng, 0).candidate.worker for _ in range(20_000)
    )
    # exp(0), exp(-0.5 / 0.5), exp(-1 / 0.5), over their sum
    assert drawn["w0"] / 20_000 == pytest.approx(0.6652, abs=0.02)
    assert drawn["w1"] / 20_000 == pytest.approx(0.2447, abs=0.02)
    assert drawn["w2"] / 20_000 == pytest.approx(0.0900, abs=0.02)


def test_a_temperature_near_zero_takes_the_cheapest():
    rng = random.Random(1)
    taken = {choose(candidates(2, 1, 9), 1e-6, rng, 0).candidate.worker for _ in range(50)}
    assert taken == {"w1"}


def test_no_candidates_is_an_error():
    with pytest.raises(ValueError, match="no worker"):
        choose([], 0.0, random.Random(0), 0)
