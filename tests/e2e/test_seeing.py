"""Metrics, Grafana's queries, traces and the dashboard, of two frontends on one port."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.browser import Browser, missing
from tests.e2e.cases import CHAT, shown, user
from tests.e2e.fleet import MODEL, ROOT, Deployment, Frontend
from tests.e2e.pictures import pattern, photograph
from tests.e2e.processes import wait_until
from tests.e2e.traces import Collector, SeenSpan
from tests.metrics_table import differences

KEY = "sesame"
HEADERS = {"Authorization": f"Bearer {KEY}"}
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"
REQUESTS = 16


@dataclass(frozen=True)
class Deployed:
    frontend: Frontend
    collector: Collector
    metrics: str


def ask(frontend: Frontend, body: dict[str, Any], **headers: str) -> httpx.Response:
    """Ask over a connection of its own, so that the kernel may choose either frontend."""
    response = httpx.post(
        frontend.url + CHAT, json={"model": MODEL, **body}, timeout=120,
        headers={**HEADERS, **headers},
    )
    assert response.status_code == 200, response.text
    return response


def some_chat(chance: random.Random, least: int = 0) -> dict[str, Any]:
    pictures = [pattern(280, 224, 40 + n) for n in range(4)]
    pictures.append(photograph("astronaut.png").resize((384, 384)))
    parts = [shown(picture) for picture in chance.sample(pictures, chance.randint(least, 2))]
    question = "What is shown here, and where may it have been taken? " * chance.randint(1, 8)
    return {"messages": [user(*parts, question)], "max_tokens": chance.choice((4, 12, 40))}


@pytest.fixture(scope="module")
def deployed(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    deployment = Deployment(checkpoint, tmp_path_factory.mktemp("seeing-logs"), "seeing")
    chance = random.Random(11)
    with Collector() as collector:
        try:
            deployment.start_worker(
                "--engine", "mock", "--mock-workers", "3", "--mock-speed", "5",
                "--num-gpu-blocks-override", "400", name="mock-worker",
            )
            frontend = deployment.start_frontend(
                "--frontends", "2", "--api-key", KEY, "--mm-preprocess-workers", "1",
                "--dashboard-thumbnails", "on", "--otlp-traces-endpoint", collector.url,
                env={
                    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
                    "OTEL_BSP_SCHEDULE_DELAY": "100",
                },
            )
            frontend.http.headers.update(HEADERS)
            deployment.await_ready([frontend], workers=3)
            wait_until(lambda: len(states_of(frontend)) == 2, 120, "the second frontend")
            traced = some_chat(random.Random(3), least=1)
            ask(frontend, traced, traceparent=f"00-{TRACE}-{CALLER}-01")
            for _ in range(REQUESTS):
                ask(frontend, some_chat(chance))
            for _ in range(60):  # until chance has sent some to each
                if all(state["log"] for state in states_of(frontend)):
                    break
                ask(frontend, some_chat(chance))
            metrics = httpx.get(frontend.url + "/metrics", timeout=30).text
            yield Deployed(frontend, collector, metrics)
        except BaseException:
            print(deployment.last_lines())
            raise
        finally:
            deployment.end()


def states_of(frontend: Frontend) -> list[dict[str, Any]]:
    answer = httpx.get(frontend.url + "/v1/dashboard/state", headers=HEADERS, timeout=30)
    states: list[dict[str, Any]] = answer.raise_for_status().json()
    return states


def test_every_metric_is_documented_and_says_which_frontend_it_is_of(
    deployed: Deployed,
) -> None:
    families = text_string_to_metric_families(deployed.metrics)
    assert differences(families, also=("frontend",)) == []


def test_grafanas_queries_find_what_they_ask_for(deployed: Deployed) -> None:
    known: dict[str, set[str]] = {}
    values: dict[tuple[str, str], set[str]] = {}
    for family in text_string_to_metric_families(deployed.metrics):
        for sample in family.samples:
            known.setdefault(sample.name, set()).update(sample.labels)
            for label, value in sample.labels.items():
                values.setdefault((sample.name, label), set()).add(value)
    dashboard = json.loads((ROOT / "configs" / "grafana" / "foveal.json").read_text())
    queries = [t["expr"] for p in dashboard["panels"] for t in p.get("targets", ())]
    assert len(queries) > 30
    for query in queries:
        assert query.count("(") == query.count(")")
        names = re.findall(r"\b(foveal_\w+)(?:\{([^}]*)\})?", query)
        assert names, query
        for name, matchers in names:
            assert name in known, f"{name} of {query}"
            for label, operator, value in re.findall(r'(\w+)(=~|=)"([^"]*)"', matchers):
                assert label in known[name], query
                if operator == "=":
                    assert value in values[name, label], query
            for group in re.findall(r"by \(([^)]*)\)", query):
                assert {label.strip() for label in group.split(",")} <= known[name], query


def test_what_was_asked_is_counted(deployed: Deployed) -> None:
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(deployed.metrics):
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    count = sum(len(state["log"]) for state in states_of(deployed.frontend))
    assert totals["foveal_requests_routed_total"] == count
    assert totals["foveal_requests_finished_total"] == count
    assert totals["foveal_router_decision_seconds_count"] == count
    assert totals["foveal_time_to_first_token_seconds_count"] == count
    assert 0 < totals["foveal_cached_tokens_total"] < totals["foveal_prompt_tokens_total"]
    assert totals["foveal_kv_delta_age_seconds_count"] > 0
    assert totals["foveal_transfer_bytes_total"] == totals["foveal_arena_bytes_written_total"]
    assert totals["foveal_transfer_seconds_total"] > 0
    assert totals["foveal_processor_cache_lookups_total"] > 0


def test_a_trace_goes_on_from_the_client_to_the_engine(deployed: Deployed) -> None:
    names = {"request", "render", "process", "route", "transfer", "prefill", "llm_request"}
    wait_until(
        lambda: names <= set(deployed.collector.of(TRACE)), 20, "all spans of the trace"
    )
    spans = deployed.collector.of(TRACE)
    assert spans["request"].parent == CALLER
    assert spans["process"].parent == spans["render"].span
    for name in names - {"request", "process"}:
        assert spans[name].parent == spans["request"].span, name
    order = [spans[name] for name in ("render", "route", "transfer", "prefill")]
    for before, after in pairwise(order):
        assert before.start <= before.end <= after.start + 1_000_000  # two clocks
    assert spans["request"].attributes["http.response.status_code"] == "200"
    assert spans["route"].attributes["foveal.worker"].startswith("mock-worker-")
    assert int(spans["prefill"].attributes["foveal.cached_tokens"]) >= 0


def test_requests_without_a_parent_have_traces_of_their_own(deployed: Deployed) -> None:
    def roots() -> list[SeenSpan]:
        return [s for s in deployed.collector.spans if s.name == "request" and not s.parent]

    wait_until(lambda: len(roots()) >= REQUESTS, 20, "a trace for each request")
    assert len({span.trace for span in roots()}) == len(roots())


def test_the_dashboards_data_ask_for_the_key(deployed: Deployed) -> None:
    for path in ("/v1/dashboard/state", "/v1/dashboard/pictures/0/1/0"):
        assert httpx.get(deployed.frontend.url + path).status_code == 401
    assert httpx.get(deployed.frontend.url + "/dashboard").status_code == 200


@pytest.mark.skipif(bool(missing()), reason=f"THE DASHBOARD IS NOT TESTED: {missing()}")
def test_the_dashboard_shows_both_frontends(deployed: Deployed, tmp_path: Path) -> None:
    count = sum(len(state["log"]) for state in states_of(deployed.frontend))
    with Browser() as browser:
        browser.resize(1280, 1100)
        browser.open(f"{deployed.frontend.url}/dashboard")
        browser.wait("#key-form")
        browser.type("#key", KEY)
        browser.click("#key-form button")
        browser.wait(".request")
        assert browser.count(".worker") == 3
        assert browser.count(".request") == count
        assert "3 of 3" in browser.text("#totals") and "2 frontends" in browser.text("#totals")
        assert "mock engines" in browser.text("#about")
        with_picture = browser.run(
            "const all = [...document.querySelectorAll('.request')];"
            "return all.findIndex((one) => one.innerText.includes('picture')"
            " && !one.innerText.includes('no pictures')) + 1"
        )
        browser.click(f".request:nth-child({with_picture}) summary")
        browser.wait(".why .pictures img")
        assert browser.count(".why tbody tr") == 3
        ask(deployed.frontend, some_chat(random.Random(99)))
        browser.wait(f".request:nth-child({count + 1})")
        assert browser.complaints() == []
        browser.screenshot(tmp_path / "dashboard.png")
        assert (tmp_path / "dashboard.png").stat().st_size > 10_000
