from __future__ import annotations

from frontend.media.url_cache import StoredMedia, UrlCache

FOR_A_MINUTE = {"Cache-Control": "max-age=60", "ETag": '"1"'}
KIB = 1024


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def stored(cache: UrlCache, url: str) -> StoredMedia:
    found = cache.get(url)
    assert found is not None
    return found


def test_it_is_fresh_until_its_time_is_over() -> None:
    clock = Clock()
    cache = UrlCache(8 * KIB, clock)
    cache.put("a", b"data", FOR_A_MINUTE)
    clock.now = 59.0
    assert cache.is_fresh(stored(cache, "a"))
    clock.now = 61.0
    assert not cache.is_fresh(stored(cache, "a"))
    cache.renew("a", stored(cache, "a"), {})
    assert cache.is_fresh(stored(cache, "a"))
    assert stored(cache, "a").data == b"data"


def test_what_must_not_be_kept_replaces_what_was() -> None:
    cache = UrlCache(8 * KIB)
    cache.put("a", b"old", FOR_A_MINUTE)
    cache.put("a", b"new", {"Cache-Control": "no-store"})
    assert cache.get("a") is None
    assert cache.stats.nbytes == 0


def test_the_least_recently_used_goes_first() -> None:
    cache = UrlCache(8 * KIB)
    for url in ("a", "b", "c"):
        cache.put(url, bytes(KIB), FOR_A_MINUTE)
    cache.get("a")
    cache.put("d", bytes(KIB), FOR_A_MINUTE)
    assert [url for url in "abcd" if cache.get(url)] == ["a", "c", "d"]
    assert cache.stats.entries == 3
    assert 3 * KIB < cache.stats.nbytes <= 8 * KIB


def test_many_small_entries_count_with_what_they_take_beside_their_data() -> None:
    cache = UrlCache(64 * KIB)
    for number in range(1000):
        cache.put(str(number), b"", FOR_A_MINUTE)
    assert cache.stats.entries < 64
    for number in range(1000):
        cache.drop(str(number))
    assert (cache.stats.entries, cache.stats.nbytes) == (0, 0)


def test_what_is_larger_than_all_of_it_is_not_kept() -> None:
    cache = UrlCache(8 * KIB)
    cache.put("a", bytes(KIB), FOR_A_MINUTE)
    cache.put("b", bytes(9 * KIB), FOR_A_MINUTE)
    assert cache.get("b") is None
    assert cache.get("a") is not None


def test_a_cache_of_nothing_keeps_nothing() -> None:
    cache = UrlCache(0)
    cache.put("a", b"", FOR_A_MINUTE)
    assert cache.get("a") is None
