"""What a worker must encode, against figures counted by hand."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.router.image_affinity import LOADING_SHARE, ImageAffinity, PromptImage
from transfer.messages import LoadReport

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


class TestSharedOutputs:
    """Workers of one host share what their encoders put out, and say what that is."""

    def told(self, images: ImageAffinity, worker: str, *identifiers: str) -> None:
        images.on_report(worker, report("host-1", list(identifiers)))

    def test_loading_an_output_costs_little_and_more_than_having_it(self):
        images = ImageAffinity()
        self.told(images, "w", "first")
        assert images.work("w", BOTH, 0, 0) == (300 // LOADING_SHARE + 400, 0)
        images.add("w", [FIRST], 0)
        assert images.work("w", BOTH, 0, 0) == (400, 0)

    def test_what_one_worker_tells_holds_for_all_of_its_host(self):
        images = ImageAffinity()
        self.told(images, "w", "first", "second")
        images.on_report("v", report("host-1", None))
        images.on_report("u", report("host-2", None))
        images.on_report("t", report("", None))
        assert images.work("v", BOTH, 0, 0).missing < 30
        assert images.work("u", BOTH, 0, 0) == images.work("t", BOTH, 0, 0) == (700, 0)

    def test_what_is_evicted_there_is_to_be_encoded_again(self):
        images = ImageAffinity()
        self.told(images, "w", "first", "second")
        self.told(images, "w", "second")
        assert images.held("w", BOTH, 0) == (2, 1, frozenset({"second"}))

    def test_cached_blocks_come_first_then_outputs_then_pixels(self):
        images = ImageAffinity()
        self.told(images, "w", "first")
        assert images.held("w", BOTH, 0) == (2, 1, frozenset({"first"}))
        assert images.held("w", BOTH, 400) == (1, 0, frozenset())
        images.add("w", [SECOND], 0)
        # What the engine itself has need not be encoded either; its pixels are sent along.
        assert images.held("w", BOTH, 0) == (2, 2, frozenset({"first"}))
        assert images.held("w", BOTH, 850) == (0, 0, frozenset())
        assert images.held("w", (), 0) == (0, 0, frozenset())

    def test_an_image_shown_twice_counts_once(self):
        again = PromptImage("first", 900, 300)
        assert ImageAffinity().held("w", (FIRST, again), 0) == (1, 0, frozenset())

    def test_a_host_without_workers_is_forgotten(self):
        images = ImageAffinity()
        self.told(images, "w", "first")
        self.told(images, "v", "first")
        images.drop_worker("w", gone=True)
        assert images.work("w", [FIRST], 0, 0) == (300, 0)
        assert images.work("v", [FIRST], 0, 0).missing < 30
        images.drop_worker("v", gone=True)
        images.on_report("v", report("host-1", None))
        assert images.work("v", [FIRST], 0, 0) == (300, 0)

    def test_a_worker_told_to_forget_still_shares(self):
        images = ImageAffinity()
        self.told(images, "w", "first")
        images.drop_worker("w")
        assert images.work("w", [FIRST], 0, 0).missing < 30

    def test_an_output_that_has_just_come_is_known_before_it_is_told(self):
        images = ImageAffinity()
        self.told(images, "w", "first")
        images.note_shared("host-1", "second")
        assert images.held("w", BOTH, 0) == (2, 2, frozenset({"first", "second"}))
        images.note_shared("", "second")  # its worker has gone meanwhile
        images.on_report("v", report("", None))
        assert images.held("v", BOTH, 0) == (2, 0, frozenset())

    def test_an_image_is_held_if_any_worker_has_its_output(self):
        images = ImageAffinity()
        self.told(images, "w", "first")
        images.add("v", [SECOND], 0)
        assert images.is_held("first", ["v", "w"])
        assert images.is_held("second", ["v", "w"])
        assert not images.is_held("second", ["w"])
        assert not images.is_held("first", [])

    def test_what_the_fleet_shows(self):
        images = ImageAffinity()
        images.on_report("w", report("host-1", ["first"], encoder_runs=3, embedding_loads=4))
        shown = {"encoder_runs": 3, "embedding_loads": 4, "shared_embeddings": 1}
        assert images.describe("w") == shown
        images.drop_worker("w", gone=True)
        assert set(images.describe("w").values()) == {0}


NAMES = ["w0", "w1", "w2"]
pictures = st.builds(
    PromptImage, st.sampled_from("abcdef"), st.integers(0, 300), st.integers(0, 200)
)
happenings = st.one_of(
    st.tuples(
        st.just("add"), st.sampled_from(NAMES), st.lists(pictures, max_size=4),
        st.integers(0, 300),
    ),
    st.tuples(st.just("drop_worker"), st.sampled_from(NAMES)),
    st.tuples(
        st.just("on_report"), st.sampled_from(NAMES),
        st.builds(
            lambda cache, held: report(cache, [*held]),
            st.sampled_from(["", "host-1", "host-2"]), st.text("abcdef", max_size=3),
        ),
    ),
)


@settings(deadline=None)
@given(
    st.lists(happenings, max_size=20),
    st.lists(pictures, max_size=4),
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=3, max_size=3),
)
def test_several_workers_at_once_are_told_what_each_would_be(events, prompt, blocks):
    images = ImageAffinity(capacity_tokens=300)
    for verb, *args in events:
        getattr(images, verb)(*args)
    # Most prompts have their images in order, some do not.
    for asked in (sorted(prompt, key=lambda image: image.offset), prompt):
        held, promised = [each[0] for each in blocks], [each[1] for each in blocks]
        missing, queued = images.works(NAMES, asked, held, promised, 16)
        assert [*zip(missing, queued, strict=True)] == [
            images.work(name, asked, a * 16, (a + b) * 16)
            for name, (a, b) in zip(NAMES, blocks, strict=True)
        ]
    for name in NAMES:
        images.drop_worker(name, gone=True)
    assert not images._holders


def report(cache: str, embeddings: list[str] | None, **counts: int) -> LoadReport:
    return LoadReport(
        epoch="e", seq=0, embedding_cache=cache, embeddings=embeddings, **counts
    )
