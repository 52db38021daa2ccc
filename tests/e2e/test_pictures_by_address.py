"""Pictures may be named by their address; the frontend fetches them, workers never do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.e2e.answers import answer_of, differences
from tests.e2e.cases import CHAT, chat_body, shown, user
from tests.e2e.fleet import Frontend, Server
from tests.e2e.pictures import encoded, photograph
from tests.e2e.reuse import ask_and_settle


class Gallery(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        content = encoded(photograph("coffee.png"))
        self.send_response(200)
        self.send_header("Content-Type", "image/png")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def gallery() -> Iterator[str]:
    """The address of a picture."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Gallery) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}/coffee.png"
        server.shutdown()


def test_a_picture_by_address_is_the_picture_itself(
    gallery: str, frontend: Frontend, vllm: Server
) -> None:
    by_address = user({"type": "image_url", "image_url": {"url": gallery}}, "What is it?")
    in_place = user(shown(photograph("coffee.png")), "What is it?")
    theirs = answer_of(vllm.ask(CHAT, chat_body(by_address)))
    for message in (by_address, in_place):
        ours = answer_of(frontend.ask(CHAT, chat_body(message)))
        assert differences(ours, theirs) == []
    frontend.settle()
    again = ask_and_settle(frontend, chat_body(by_address))
    assert again.cached_tokens == again.reusable_tokens > 0
