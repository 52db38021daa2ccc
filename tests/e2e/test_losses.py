"""Workers and frontends go, well or badly, and no client notices. Mock engines.

Each test leaves the fleet as it found it: three workers, each a process, and one frontend.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.cases import CHAT, shown, user
from tests.e2e.fleet import MODEL, Deployment, Frontend
from tests.e2e.pictures import pattern
from tests.e2e.processes import Process, wait_until

WORKERS = 3
TOKENS = 150
RECOVERY_SECONDS = 30.0
"""On a busy machine; what it takes on an idle one is measured by benchmarks.chaos."""


class LossFleet:
    """Three mock workers behind a frontend; whoever ends one puts another in its place."""

    def __init__(self, checkpoint: Path, logs: Path) -> None:
        self.deployment = Deployment(checkpoint, logs, "losses")
        self.workers = [self.start_worker() for _ in range(WORKERS)]
        self.frontend = self.deployment.start_frontend("--mm-preprocess-workers", "0")
        self.deployment.await_ready([self.frontend], workers=WORKERS)

    def start_worker(self) -> Process:
        # 16 ms for a token: time to take a worker away in the middle of an answer.
        return self.deployment.start_worker(
            "--engine", "mock", "--mock-speed", "0.5", "--num-gpu-blocks-override", "2000",
            name="mock-worker",
        )

    def replace(self, worker: Process) -> None:
        """Put a new worker where one has ended, and wait until it is used."""
        self.workers[self.workers.index(worker)] = self.start_worker()
        self.await_all()

    def await_all(self) -> None:
        """Put a new worker wherever one has ended, and wait until all are used."""
        for ended in [w for w in self.workers if w.exit_status is not None]:
            self.workers[self.workers.index(ended)] = self.start_worker()
        wait_until(lambda: self.frontend.has_workers(WORKERS), 120.0, "another worker")

    def worker_named(self, name: str) -> Process:
        (worker,) = (w for w in self.workers if f"-{w.pid}-" in name)
        return worker

    def moved(self) -> float:
        """How many requests have been sent on to another worker."""
        return self.frontend.count("requests_moved")


@pytest.fixture(scope="module")
def shared_fleet(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LossFleet]:
    fleet = LossFleet(checkpoint, tmp_path_factory.mktemp("loss-logs"))
    yield fleet
    print(fleet.deployment.last_lines(15))  # shown when something has failed
    fleet.deployment.end()


@pytest.fixture
def fleet(shared_fleet: LossFleet) -> LossFleet:
    """Whole again, should a test before this one have failed halfway."""
    shared_fleet.await_all()
    return shared_fleet


def question(number: int, **options: Any) -> dict[str, Any]:
    picture = shown(pattern(140, 112, 9000 + number))
    return {
        "model": MODEL, "messages": [user(picture, f"Tell me {number}.")],
        "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, **options,
    }


class Stream:
    """An answer that is being read, and is told apart when it has begun."""

    def __init__(self, frontend: Frontend, body: dict[str, Any]) -> None:
        self.worker = ""
        self.text = ""
        self.reason = ""
        self.usage: dict[str, Any] = {}
        self.error = ""
        self._frontend = frontend
        self._body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert self._begun.wait(60.0), "no answer has begun"

    def _read(self) -> None:
        try:
            with httpx.stream(
                "POST", f"{self._frontend.url}{CHAT}", json=self._body, timeout=60.0
            ) as response:
                self.worker = response.headers["x-foveal-worker"]
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        self._take(json.loads(line.removeprefix("data: ")))
        except httpx.TransportError as error:
            self.error = repr(error)

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = event["error"]["message"]
            return
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            self.text += choice["delta"].get("content") or ""
            self.reason = choice["finish_reason"] or self.reason
        if len(self.text) > 5:
            self._begun.set()

    def finish(self) -> Stream:
        """Wait for the end of the answer."""
        self._thread.join(120.0)
        assert not self._thread.is_alive(), f"still running after {self.text!r}"
        return self

    def is_whole(self, text: str) -> bool:
        """Whether it is ``text`` from begin to end, and says so."""
        assert self.error == ""
        assert self.text == text
        assert (self.reason, self.usage["completion_tokens"]) == ("length", TOKENS)
        return True


def undisturbed(frontend: Frontend, body: dict[str, Any]) -> tuple[str, int]:
    """Its text and how many tokens its prompt has."""
    answer = frontend.ask(CHAT, body).json()
    return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "seed": 3}])
def test_an_answer_goes_on_token_for_token_when_its_worker_is_killed(
    fleet: LossFleet, options: dict[str, Any]
) -> None:
    body = question(1, **options)
    text, prompt_tokens = undisturbed(fleet.frontend, body)
    before = fleet.moved()
    stream = Stream(fleet.frontend, body)
    victim = fleet.worker_named(stream.worker)
    victim.signal(signal.SIGKILL)
    assert stream.finish().is_whole(text)
    assert stream.usage["prompt_tokens"] == prompt_tokens
    assert fleet.moved() == before + 1
    fleet.replace(victim)


def test_a_worker_that_is_stopped_is_missed_and_taken_back(fleet: LossFleet) -> None:
    body = question(2)
    text, _ = undisturbed(fleet.frontend, body)
    stream = Stream(fleet.frontend, body)
    victim = fleet.worker_named(stream.worker)
    victim.signal(signal.SIGSTOP)
    try:
        wait_until(
            lambda: fleet.frontend.has_workers(WORKERS - 1), RECOVERY_SECONDS, "it missed"
        )
        assert stream.finish().is_whole(text)
    finally:
        victim.signal(signal.SIGCONT)
    wait_until(lambda: fleet.frontend.has_workers(WORKERS), RECOVERY_SECONDS, "it back")
    assert stream.worker in fleet.frontend.workers()
    assert Stream(fleet.frontend, body).finish().is_whole(text)


def test_both_answers_to_one_request_move(fleet: LossFleet) -> None:
    body = question(3, n=2, temperature=0.7, seed=5)
    answer = fleet.frontend.ask(CHAT, body).json()
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    replies: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: replies.append(fleet.frontend.ask(CHAT, body)))
    busy: list[str] = []

    def is_begun() -> bool:
        busy[:] = [n for n, w in fleet.frontend.workers().items() if w["requests"] == 2]
        return bool(busy)

    asking.start()
    wait_until(is_begun, 60.0, "both at a worker")
    victim = fleet.worker_named(busy[0])
    victim.signal(signal.SIGKILL)
    asking.join(120.0)
    (reply,) = replies
    assert [c["message"]["content"] for c in reply.json()["choices"]] == texts
    assert reply.json()["usage"]["completion_tokens"] == 2 * TOKENS
    fleet.replace(victim)


def test_what_cannot_go_on_says_why(fleet: LossFleet) -> None:
    # Drawn without a seed, and the engine counts what it has drawn.
    stream = Stream(
        fleet.frontend, question(4, temperature=0.7, presence_penalty=0.5)
    )
    victim = fleet.worker_named(stream.worker)
    victim.signal(signal.SIGKILL)
    assert "could not go on elsewhere" in stream.finish().error
    assert "with a seed or temperature 0 it could" in stream.error
    wait_until(lambda: fleet.frontend.fleet()["requests"] == 0, 20.0, "nothing in flight")
    fleet.replace(victim)


def test_a_worker_that_is_told_to_leave_finishes_its_answers(fleet: LossFleet) -> None:
    body = question(5)
    text, _ = undisturbed(fleet.frontend, body)
    before = fleet.moved()
    stream = Stream(fleet.frontend, body)
    leaving = fleet.worker_named(stream.worker)
    leaving.signal(signal.SIGTERM)
    wait_until(
        lambda: fleet.frontend.fleet_worker(stream.worker)["draining"],
        RECOVERY_SECONDS, "it drains",
    )
    # Nothing new goes there.
    for number in range(4):
        reply = fleet.frontend.ask(CHAT, {**question(6), "max_tokens": 1 + number})
        assert reply.headers["x-foveal-worker"] != stream.worker
    assert stream.finish().is_whole(text)
    assert fleet.moved() == before
    assert leaving.wait(RECOVERY_SECONDS) == 0
    fleet.replace(leaving)


def test_a_rolling_restart_of_every_worker_loses_no_request(fleet: LossFleet) -> None:
    bodies = [question(10 + number, max_tokens=40) for number in range(6)]
    texts = [undisturbed(fleet.frontend, body)[0] for body in bodies]
    failures: list[str] = []
    counts = [0] * len(bodies)
    stopping = threading.Event()

    def ask_on(number: int) -> None:
        with httpx.Client(timeout=60.0) as http:
            while not stopping.is_set():
                reply = http.post(f"{fleet.frontend.url}{CHAT}", json=bodies[number])
                if reply.status_code != 200:
                    failures.append(reply.text)
                elif reply.json()["choices"][0]["message"]["content"] != texts[number]:
                    failures.append(f"another answer to {number}")
                counts[number] += 1

    threads = [threading.Thread(target=ask_on, args=(n,)) for n in range(len(bodies))]
    for thread in threads:
        thread.start()
    try:
        for worker in list(fleet.workers):
            worker.signal(signal.SIGTERM)
            assert worker.wait(60.0) == 0
            fleet.replace(worker)
    finally:
        stopping.set()
        for thread in threads:
            thread.join(60.0)
    assert failures == []
    assert min(counts) > 0


def test_a_frontend_that_is_told_to_leave_finishes_its_streams(fleet: LossFleet) -> None:
    leaving = fleet.deployment.start_frontend("--mm-preprocess-workers", "0", name="leaving")
    fleet.deployment.await_ready([leaving], workers=WORKERS)
    body = question(20)
    text, _ = undisturbed(leaving, body)
    stream = Stream(leaving, body)
    leaving.process.signal(signal.SIGTERM)
    wait_until(lambda: is_refused(leaving), RECOVERY_SECONDS, "it listens no more")
    assert stream.finish().is_whole(text)
    assert leaving.process.wait(RECOVERY_SECONDS) == 0
    leaving.end()


def test_a_frontend_that_is_killed_leaves_nothing_behind(fleet: LossFleet) -> None:
    dying = fleet.deployment.start_frontend("--mm-preprocess-workers", "0", name="dying")
    fleet.deployment.await_ready([dying], workers=WORKERS)
    stream = Stream(dying, question(21, max_tokens=4000))
    dying.process.signal(signal.SIGKILL)
    assert stream.finish().error

    def is_at_rest() -> bool:
        loads = [worker["load"] for worker in fleet.frontend.workers().values()]
        return not any(load["requests"] or load["engine_blocks"] for load in loads)

    # The workers tell the other frontend what that one had in flight, until they drop it.
    wait_until(is_at_rest, RECOVERY_SECONDS, "its requests dropped")
    dying.end()
    last = fleet.deployment.start_frontend("--mm-preprocess-workers", "0", name="last")
    assert_swept(dying.process.pid, lambda: last.answers())
    last.end()


def is_refused(server: Frontend) -> bool:
    try:
        httpx.get(f"{server.url}/health", timeout=5.0)
    except httpx.ConnectError:
        return True
    except httpx.TransportError:
        pass
    return False


def assert_swept(pid: int, ready: Callable[[], bool]) -> None:
    """The next frontend that starts removes the arena of one that was killed."""
    assert list(Path("/dev/shm").glob(f"foveal-{pid}-*"))
    wait_until(ready, 120.0, "another frontend")
    assert not list(Path("/dev/shm").glob(f"foveal-{pid}-*"))
