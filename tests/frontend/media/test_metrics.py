from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from frontend.media.metrics import UrlCacheCollector
from frontend.media.url_cache import UrlCache


def test_what_the_url_cache_counts_is_shown() -> None:
    cache, registry = UrlCache(1 << 20), CollectorRegistry()
    registry.register(UrlCacheCollector(cache.stats))
    cache.put("a", bytes(100), {"ETag": '"1"'})
    cache.stats.hits, cache.stats.renewed, cache.stats.misses = 3, 2, 1
    shown = generate_latest(registry).decode().splitlines()
    assert {
        'foveal_url_cache_lookups_total{result="hit"} 3.0',
        'foveal_url_cache_lookups_total{result="renewed"} 2.0',
        'foveal_url_cache_lookups_total{result="miss"} 1.0',
        "foveal_url_cache_entries 1.0",
        f"foveal_url_cache_bytes {float(cache.stats.nbytes)}",
    } <= set(shown)
    assert cache.stats.nbytes > 100
