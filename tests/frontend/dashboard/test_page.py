"""The page as a browser shows it: filled, empty, locked, and cut off."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from PIL import Image

from tests.browser import Browser, missing
from tests.frontend.dashboard.pages import Page, a_frontend, a_request, a_worker

pytestmark = pytest.mark.skipif(
    bool(missing()), reason=f"THE DASHBOARD IS NOT TESTED: {missing()}"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        browser.resize(1280, 900)
        yield browser


@pytest.fixture
def page() -> Iterator[Page]:
    page = Page()
    with page.running():
        yield page


def test_workers_and_requests_are_shown(browser: Browser, page: Page) -> None:
    browser.open(page.url)
    browser.wait("#connection", "live")
    assert "2 of 2" in browser.text("#totals")
    assert browser.count(".worker") == 2
    card = browser.text(".worker")
    for words in ("worker-17-a", "60 %", "40 of 400", "900 tokens", "shm", "busy"):
        assert words in card
    row = browser.text(".request summary")
    for words in ("chatcmpl-1", "1 picture", "by shm", "320 of 800 tokens", "42 ms", "done"):
        assert words in row
    widths = browser.run(
        "return [...document.querySelectorAll('.request .prompt .bar > span')]"
        ".map((part) => [part.className, part.style.width])"
    )
    assert widths == [["cached", "40%"], ["missed", "20%"]]
    assert browser.complaints() == []


def test_why_this_worker_is_answered(browser: Browser, page: Page) -> None:
    browser.open(page.url)
    browser.wait(".request")
    browser.click(".request summary")
    browser.wait(".why tbody tr")
    rows = [browser.text(f".why tbody tr:nth-child({n})") for n in (1, 2)]
    assert "chosen" in rows[0] and "400" in rows[0] and "holds 480 tokens" in rows[0]
    assert "1,234" in rows[1] and "must encode 252" in rows[1] and "promised 64" in rows[1]
    # It stays open while the page goes on being told news.
    (first,) = page.state.told["log"]
    page.state.told = a_frontend(
        log=[a_request(2, arrived=first["arrived"] + 1), {**first, "outcome": "length"}]
    )
    browser.wait(".request:nth-child(2) .outcome", "done, full length")
    assert browser.count(".request:nth-child(2) details[open]") == 1


def test_nothing_is_shown_of_an_empty_deployment_but_words(
    browser: Browser, page: Page
) -> None:
    page.state.told = a_frontend(workers=[], log=[], arena=None, requests=0)
    browser.open(page.url)
    browser.wait("#no-workers", "No worker has answered yet")
    browser.wait("#no-requests", "No requests yet")
    assert "NaN" not in browser.text("main") and "undefined" not in browser.text("main")
    assert browser.complaints() == []


def test_a_worker_that_cannot_be_used_says_why(browser: Browser, page: Page) -> None:
    page.state.told = a_frontend(
        workers=[a_worker(ready=False, transfer=None, refused="its dtype is 'bfloat16'")]
    )
    browser.open(page.url)
    browser.wait(".worker .reason", "its dtype is 'bfloat16'")
    assert "refused" in browser.text(".worker .state")


def test_a_worker_that_is_going_to_leave_is_not_shown_as_ready(
    browser: Browser, page: Page
) -> None:
    page.state.told = a_frontend(
        workers=[a_worker(), a_worker("worker-17-b", draining=True)]
    )
    browser.open(page.url)
    browser.wait('.worker[data-state="absent"] .state', "leaving")
    assert "1 of 2" in browser.text("main")


def test_what_users_write_stays_text(browser: Browser, page: Page) -> None:
    hostile = "<img src=x onerror=\"document.title='owned'\"><script>alert(1)</script>"
    page.state.told = a_frontend(
        log=[a_request(id=hostile, adapter=hostile, worker=hostile)],
        workers=[a_worker(hostile, transfer_reason=hostile, refused=hostile)],
    )
    browser.open(page.url)
    browser.wait(".request code", "<img src=x")
    browser.click(".request summary")
    browser.wait(".why tbody tr")
    assert browser.count("main script") == browser.count("main img") == 0
    assert browser.run("return document.title") == "Foveal"
    assert browser.complaints() == []


def test_the_policy_forbids_inline_script(browser: Browser, page: Page) -> None:
    browser.open(page.url)
    browser.wait("#connection", "live")
    browser.run(
        "const script = document.createElement('script');"
        "script.textContent = \"document.title = 'owned'\"; document.body.append(script);"
    )
    assert browser.run("return document.title") == "Foveal"
    assert any("Content Security Policy" in line for line in browser.complaints())


def test_the_key_is_asked_for_and_used(browser: Browser, page: Page) -> None:
    page.key = "sesame"
    browser.open(page.url)
    browser.wait("#key-form")
    assert page.state.asked == 0
    assert browser.run("return document.querySelector('main').hidden")
    browser.type("#key", "wrong")
    browser.click("#key-form button")
    browser.wait("#key-form", "asks for its API key")
    browser.type("#key", "sesame")
    browser.click("#key-form button")
    browser.wait(".worker")
    browser.run("sessionStorage.clear()")


def test_a_lost_frontend_is_noticed_and_found_again(browser: Browser) -> None:
    page = Page()
    with page.running():
        browser.open(page.url)
        browser.wait("#connection", "live")
    browser.wait("#problem", "does not answer")
    assert browser.text("#connection") == "disconnected"
    assert browser.count(".worker") == 2  # what was known stays, dimmed
    assert browser.count("main.old") == 1
    with page.running():
        browser.wait("#connection", "live")
        assert browser.run("return document.getElementById('problem').hidden")


@pytest.mark.parametrize(
    ("status", "words"), [(503, "Too many dashboards"), (500, "status 500")]
)
def test_other_failures_are_told(
    browser: Browser, page: Page, status: int, words: str
) -> None:
    page.status = status
    browser.open(page.url)
    browser.wait("#problem", words)
    page.status = 200
    browser.wait("#connection", "live")


def test_thumbnails_are_fetched_when_a_request_is_opened(browser: Browser, page: Page) -> None:
    picture = io.BytesIO()
    Image.new("RGB", (400, 200), "orange").save(picture, "PNG")
    page.state.told = a_frontend(thumbnails=True, log=[a_request(pictures=2)])
    page.state.pictures = {(1, 0): picture.getvalue()}  # the other is gone
    browser.open(page.url)
    browser.wait(".request")
    assert browser.count("main img") == 0
    browser.click(".request summary")
    browser.wait(".why .pictures img")
    size = "const i = document.querySelector('main img'); return i.naturalWidth"
    assert browser.run(size) in (0, 96)  # 0 until it is loaded
    assert browser.count("main img") == 1


@pytest.mark.parametrize("width", [360, 390, 768, 1280])
def test_it_fits_every_width(browser: Browser, page: Page, width: int) -> None:
    long = "worker-" + "x" * 90
    page.state.told = a_frontend(
        workers=[a_worker(long)], log=[a_request(worker=long, id="chatcmpl-" + "y" * 200)]
    )
    browser.resize(width, 800)
    try:
        browser.open(page.url)
        browser.wait(".request")
        browser.click(".request summary")
        browser.wait(".why tbody tr")
        assert browser.run("return document.documentElement.scrollWidth") <= width
    finally:
        browser.resize(1280, 900)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_schemes(browser: Browser, page: Page, scheme: str) -> None:
    outcomes = ("running", "stop", "length", "abort", "error", "lost")
    page.state.told = a_frontend(
        log=[a_request(n, outcome=outcome) for n, outcome in enumerate(outcomes)],
        workers=[
            a_worker(),
            a_worker("worker-17-b", transfer="inline", kv_caught_up=False),
            a_worker("worker-17-c", ready=False, refused="its dtype differs"),
        ],
    )
    browser.color_scheme(scheme)
    browser.open(page.url)
    browser.wait("#connection", "live")
    browser.click(".request summary")
    browser.wait(".why tbody tr")
    contrasts = browser.run(CONTRASTS)
    assert len(contrasts) > 20
    assert [c for c in contrasts if c[1] < 4.5] == []
    browser.color_scheme("light")


CONTRASTS = """
const channel = (c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
const light = (rgb) => {
  const [r, g, b] = rgb.match(/[\\d.]+/g).map(Number);
  return 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
};
const behind = (element) => {
  for (; element; element = element.parentElement) {
    const color = getComputedStyle(element).backgroundColor;
    if (!/, 0\\)$/.test(color)) return color;
  }
  return "rgb(255, 255, 255)";
};
return [...document.querySelectorAll("header *, main *")]
  .filter((e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()))
  .filter((e) => e.offsetParent !== null)
  .map((e) => {
    const pair = [light(getComputedStyle(e).color), light(behind(e))].sort((a, b) => b - a);
    return [e.textContent.slice(0, 30), (pair[0] + 0.05) / (pair[1] + 0.05)];
  });
"""
