from __future__ import annotations

from email.utils import formatdate

import pytest

from frontend.media.http_freshness import freshness, renewed

NOW = 1_800_000_000.0


def date(seconds: float) -> str:
    """A date header, so many seconds from NOW."""
    return formatdate(NOW + seconds, usegmt=True)


@pytest.mark.parametrize(
    "headers, seconds",
    [
        ({"Cache-Control": "max-age=60"}, 60),
        ({"Cache-Control": "public, MAX-AGE=60"}, 60),
        ({"Cache-Control": 'max-age="60"'}, 60),
        ({"Cache-Control": "max-age=60, s-maxage=10"}, 10),
        ({"Cache-Control": "max-age=60", "Age": "45"}, 15),
        ({"Cache-Control": "max-age=60", "Date": date(-50)}, 10),
        ({"Cache-Control": "max-age=60", "Date": date(-10), "Age": "20"}, 40),
        ({"Cache-Control": "max-age=60", "Date": date(+500)}, 60),
        ({"Expires": date(+30), "Date": date(0)}, 30),
        ({"Expires": date(+30), "Date": date(-10)}, 30),
        ({"Expires": date(+30), "Date": date(0), "Cache-Control": "max-age=5"}, 5),
    ],
)
def test_for_how_long_a_response_is_fresh(headers: dict[str, str], seconds: float) -> None:
    found = freshness(headers, NOW)
    assert found is not None
    assert found.seconds == pytest.approx(seconds)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Cache-Control": "no-cache, max-age=60"},
        {"Cache-Control": "max-age=60", "Date": date(-61)},
        {"Cache-Control": "max-age=-1"},
        {"Cache-Control": "max-age=soon"},
        {"Expires": "0"},
        {"Expires": "0", "Date": date(0)},
        {"Expires": date(+30), "Date": date(0), "Pragma": "no-cache"},
        {"Last-Modified": date(-1e8)},
    ],
)
def test_what_is_not_fresh_is_kept_only_to_be_asked_about(headers: dict[str, str]) -> None:
    found = freshness(headers | {"ETag": '"1"'}, NOW)
    assert found is not None
    assert found.seconds == 0
    assert found.conditions["If-None-Match"] == '"1"'
    if "Last-Modified" not in headers:
        assert freshness(headers, NOW) is None


@pytest.mark.parametrize(
    "headers",
    [{"Cache-Control": "no-store, max-age=60"}, {"Cache-Control": "private, max-age=60"},
     {"Cache-Control": 'private="Set-Cookie"'}, {"Vary": "*"}, {"Vary": "Accept, *"}],
)
def test_what_must_not_be_stored(headers: dict[str, str]) -> None:
    assert freshness(headers | {"ETag": '"1"'}, NOW) is None


def test_both_validators_are_asked_about() -> None:
    found = freshness({"ETag": 'W/"1"', "Last-Modified": date(-5)}, NOW)
    assert found is not None
    assert found.conditions == {
        "If-None-Match": 'W/"1"', "If-Modified-Since": date(-5),
    }


def test_a_304_says_anew_how_long_and_keeps_the_rest() -> None:
    stored = {"Cache-Control": "max-age=60", "ETag": '"1"', "Date": date(-90), "Age": "7"}
    headers = renewed(stored, {"Date": date(0)})
    assert headers == {"Cache-Control": "max-age=60", "ETag": '"1"', "Date": date(0)}
    found = freshness(headers, NOW)
    assert found is not None and found.seconds == 60
    assert freshness(renewed(stored, {"Cache-Control": "no-store"}), NOW) is None
