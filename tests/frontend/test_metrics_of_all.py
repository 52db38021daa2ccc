"""The metrics of several frontend processes in one text."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from frontend.metrics_of_all import QUESTION, labelled, metrics_routes, own_metrics
from frontend.siblings import Siblings


def one_process(count: int) -> bytes:
    registry = CollectorRegistry()
    Counter("foveal_a", "A.", ["worker"], registry=registry).labels('w"1').inc(count)
    Gauge("foveal_b", "B.", registry=registry).set(10 * count)
    Histogram("foveal_c_seconds", "C.", buckets=(1, 2), registry=registry).observe(count)
    return own_metrics(registry)


def samples(text: bytes) -> dict[tuple[str, str], float]:
    return {
        (sample.name, sample.labels["frontend"]): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if sample.labels.get("le") in (None, "1.0")
    }


def test_every_sample_says_which_frontend_it_is_of() -> None:
    text = labelled({0: one_process(1), 3: one_process(5)})
    found = samples(text)
    assert (found["foveal_a_total", "0"], found["foveal_a_total", "3"]) == (1, 5)
    assert (found["foveal_b", "0"], found["foveal_b", "3"]) == (10, 50)
    assert found["foveal_c_seconds_bucket", "0"] == 1
    assert found["foveal_c_seconds_bucket", "3"] == 0
    assert text.count(b"# TYPE foveal_b gauge") == 1
    assert b'worker="w\\"1"' in text


@pytest.mark.anyio
async def test_whoever_answers_tells_of_all(tmp_path: Path) -> None:
    here, there = Siblings(tmp_path), Siblings(tmp_path)

    async def answer(question: str) -> bytes:
        assert question == QUESTION
        return one_process(7)

    await there.serve(answer)
    app = FastAPI()
    app.include_router(metrics_routes(here))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        response = await http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    found = samples(response.content)
    assert found["foveal_a_total", "1"] == 7
    assert ("python_info", "0") in found
    there.close()
    here.close()
