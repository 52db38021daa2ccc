"""The running fleet, as ``foveal status`` shows it."""

from __future__ import annotations

import http.server
import io
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from configs.cli import main
from configs.deployment.fleet import NoFleet, fetch_fleet, fleet_table, look_at

WORKER: dict[str, Any] = {
    "id": "worker-1", "address": "tcp://h:1", "ready": True, "refused": None,
    "transfer": "shm", "requests": 2, "kv_caught_up": True, "load": {"blocks": 7},
}
FLEET = {
    "requests": 3, "router_mode": "kv",
    "workers": [
        WORKER,
        {**WORKER, "id": "worker-2", "ready": False, "refused": "its dtype is 'half'",
         "transfer": None},
    ],
}


class Server:
    """Answers everything with what the test sets."""

    status = 200
    body: Any = FLEET
    key = ""

    def __init__(self) -> None:
        outer = self

        class Answer(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                wanted = f"Bearer {outer.key}" if outer.key else None
                allowed = wanted in (None, self.headers["Authorization"])
                self.send_response(outer.status if allowed else 401)
                self.end_headers()
                self.wfile.write(json.dumps(outer.body).encode())

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def test_the_table_has_a_line_for_each_worker() -> None:
    output = io.StringIO()
    Console(file=output, width=160).print(fleet_table(FLEET))
    text = output.getvalue()
    assert "3 requests in flight, routed by kv" in text
    (first,) = [line for line in text.splitlines() if "worker-1" in line]
    assert all(word in first for word in ("ready", "shm", "7"))
    assert "refused: its dtype is 'half'" in text


def test_status_is_0_while_somebody_works(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", server.url + "/"]) == 0
    assert "worker-2" in capsys.readouterr().out
    assert main(["status", server.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == FLEET
    server.body = {**FLEET, "workers": []}
    assert main(["status", server.url]) == 1


def test_a_key_is_sent_and_asked_for(server: Server) -> None:
    server.key = "k"
    assert fetch_fleet(server.url, "k") == FLEET
    with pytest.raises(NoFleet, match=r"401 .*: give the key with --api-key"):
        fetch_fleet(server.url)


@pytest.mark.parametrize("body", [{}, [], {"workers": 3}, "text"])
def test_another_server_is_not_taken_for_a_frontend(server: Server, body: Any) -> None:
    server.body = body
    with pytest.raises(NoFleet, match="is not a frontend of Foveal"):
        fetch_fleet(server.url)


def test_nobody_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "http://127.0.0.1:1"]) == 1
    assert main(["status", "127.0.0.1:1"]) == 1  # as people write it
    assert capsys.readouterr().err == 2 * (
        "foveal status: no frontend answers at http://127.0.0.1:1: Connection refused\n"
    )
    with pytest.raises(NoFleet):
        fetch_fleet("not a url")


def test_how_far_a_frontend_is(server: Server) -> None:
    assert look_at(server.url) == (state := look_at(server.url))
    assert (state.answers, state.healthy, state.ready) == (True, True, 1)
    server.status = 503
    assert not look_at(server.url).answers
