"""docs/metrics.md lists every metric of ours, as it is."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from configs.schema import FrontendConfig
from frontend.admission import Admission, FleetLoad, limits_from
from frontend.media.metrics import UrlCacheCollector
from frontend.media.url_cache import UrlCache
from frontend.metrics_of_all import own_metrics
from frontend.preprocess.metrics import PreprocessMetrics
from tests.fakes import make_item, make_request
from tests.frontend.fleets import Fleet
from tests.metrics_table import differences, documented
from transfer.registry import Registry

pytestmark = pytest.mark.anyio


async def test_every_metric_is_documented_and_the_other_way_round(registry: Registry) -> None:
    async with Fleet(registry) as fleet:
        await fleet.start()
        fleet.collect()
        fleet.metrics.register(UrlCacheCollector(UrlCache(1 << 20).stats))
        PreprocessMetrics(fleet.metrics)
        Admission(limits_from(FrontendConfig()), fleet.client, FleetLoad, fleet.metrics)
        await fleet.client.add_request_async(make_request("r", items=[make_item(1.0)]))
        await fleet.answer("r")
        families = list(text_string_to_metric_families(own_metrics(fleet.metrics).decode()))
    assert len(documented()) > 40
    assert differences(families, also=()) == []
