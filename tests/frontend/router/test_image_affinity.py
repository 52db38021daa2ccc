"""What a worker must encode, against figures counted by hand."""

from __future__ import annotations

from frontend.router.image_affinity import ImageAffinity, PromptImage

# A prompt of 1,000 tokens: 100 of text, two images, text between and behind.
FIRST = PromptImage("first", 100, 300)
SECOND = PromptImage("second", 450, 400)
BOTH = (FIRST, SECOND)


def test_a_worker_that_has_seen_nothing_encodes_all():
    assert ImageAffinity().work("w", BOTH, 0, 0) == (700, 0)


def test_an_image_within_the_cached_prefix_is_not_encoded():
    images = ImageAffinity()
    assert images.work("w", BOTH, 400, 400) == (400, 0)
    assert images.work("w", BOTH, 399, 399) == (700, 0)
    assert images.work("w", BOTH, 850, 850) == (0, 0)


def test_an_image_encoded_lately_is_not_encoded_again_though_its_blocks_are_gone():
    images = ImageAffinity()
    images.add("w", [FIRST], 0)
    assert images.work("w", BOTH, 0, 0) == (400, 0)
    assert images.work("v", BOTH, 0, 0) == (700, 0)


def test_an_image_about_to_be_encoded_waits_in_the_queue():
    images = ImageAffinity()
    images.add("w", BOTH, 0)
    # The worker is about to compute the first 832 tokens: all of one, most of the other.
    assert images.work("w", BOTH, 0, 832) == (0, 700)
    # It holds the first image's blocks by now.
    assert images.work("w", BOTH, 416, 832) == (0, 400)


def test_an_image_in_cached_blocks_is_not_refreshed():
    images = ImageAffinity()
    images.add("w", [FIRST], held_tokens=400)
    assert len(images) == 0
    assert images.work("w", [FIRST], 0, 0) == (300, 0)


def test_as_many_are_remembered_as_the_encoder_cache_holds():
    images = ImageAffinity(capacity_tokens=700)
    images.add("w", BOTH, 0)
    images.add("w", [FIRST], 0)
    images.add("w", [PromptImage("third", 0, 300)], 0)
    assert images.work("w", BOTH, 0, 0) == (400, 0)
    assert len(images) == 2


def test_an_image_larger_than_the_cache_is_not_remembered():
    images = ImageAffinity(capacity_tokens=200)
    images.add("w", [FIRST], 0)
    assert images.work("w", [FIRST], 0, 0) == (300, 0)


def test_a_worker_that_is_told_to_forget_holds_nothing():
    images = ImageAffinity()
    images.add("w", BOTH, 0)
    images.add("v", BOTH, 0)
    images.drop_worker("w")
    assert images.work("w", BOTH, 0, 0) == (700, 0)
    assert images.work("v", BOTH, 0, 0) == (0, 0)
    assert len(images) == 2
