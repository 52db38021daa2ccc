"""``/metrics`` of several frontend processes: whichever answers tells of all.

Nothing is added up: every sample gets the label ``frontend``, the number of its process,
so that gauges keep their meaning and a counter that began anew is seen as such. The
number is the same after a process was started again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from frontend.siblings import Siblings

QUESTION = "metrics"


def own_metrics(registry: CollectorRegistry = REGISTRY) -> bytes:
    """The metrics of this process as Prometheus reads them.

    For the event loop only: what is read for them changes there.
    """
    return generate_latest(registry)


def labelled(texts: Mapping[int, bytes]) -> bytes:
    """One text of several, each sample labelled with the frontend it is of."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Labelled(texts))
    return generate_latest(registry)


class _Labelled(Collector):
    def __init__(self, texts: Mapping[int, bytes]) -> None:
        self._texts = texts

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for number, text in sorted(self._texts.items()):
            for family in text_string_to_metric_families(text.decode()):
                joined = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    labels = {**sample.labels, "frontend": str(number)}
                    joined.add_sample(sample.name, labels, sample.value)
        return families.values()


def metrics_routes(siblings: Siblings) -> APIRouter:
    """``/metrics``, in place of vLLM's."""
    routes = APIRouter()

    @routes.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        texts = await siblings.ask_all(QUESTION)
        texts[siblings.number] = own_metrics()
        text = await asyncio.to_thread(labelled, texts)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    return routes
