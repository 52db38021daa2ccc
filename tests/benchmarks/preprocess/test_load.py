from __future__ import annotations

import itertools
import json

from benchmarks.preprocess.load import PREPARED, bodies


def test_no_two_requests_have_the_same_picture() -> None:
    made = list(bodies("m", PREPARED + 2, 5))
    assert len(made) == PREPARED + 2
    urls = {json.loads(b)["messages"][0]["content"][0]["image_url"]["url"] for b in made}
    assert len(urls) == PREPARED + 2


def test_without_a_count_there_is_no_end() -> None:
    assert len(list(itertools.islice(bodies("m", 0, 5), PREPARED + 5))) == PREPARED + 5
