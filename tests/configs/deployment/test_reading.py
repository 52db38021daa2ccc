"""Files of deployments: what they may say, and how they are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from configs.deployment.reading import BadDeployment, DeploymentFile, read_deployment

ROOT = Path(__file__).parents[3]
SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))


def read(tmp_path: Path, text: str, *overrides: str) -> DeploymentFile:
    path = tmp_path / "d.yaml"
    path.write_text(text)
    return read_deployment(path, overrides)


def problems(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(BadDeployment) as refusal:
        read(tmp_path, text, *overrides)
    prefix = f"{tmp_path / 'd.yaml'}:"
    return [problem.removeprefix(prefix) for problem in refusal.value.problems]


def test_the_five_shipped_files_are_right() -> None:
    assert {path.stem for path in SHIPPED} == {
        "demo-cpu", "single-node-shm", "multi-node-nixl", "secure", "ray-cluster"
    }
    for path in SHIPPED:
        assert read_deployment(path).name == path.stem


def test_little_has_to_be_said(tmp_path: Path) -> None:
    deployment = read(tmp_path, "model: m\n").deployment
    assert (deployment.worker_count, deployment.transfer) == (1, "auto")
    assert (deployment.http.host, deployment.http.port) == ("127.0.0.1", 8000)


def test_all_that_is_wrong_is_said_with_its_line_and_key(tmp_path: Path) -> None:
    text = """\
namespace: a b
htp: {}
http:
  port: 99999
workers:
  - count: 0
    option: {}
router: {mode: kvv}
transfer: pigeon
"""
    found = problems(tmp_path, text)
    assert found[0] == "1: model: must be given"
    assert found[1].startswith("1: namespace: string should match pattern")
    assert found[2:] == [
        "2: htp: there is no such key; is it http?",
        "4: http.port: must be at most 65535",
        "6: workers.0.count: must be at least 1",
        "7: workers.0.option: there is no such key; is it options?",
        "8: router.mode: 'kv', 'round-robin', 'random' or 'least-loaded' is needed",
        "9: transfer: 'auto', 'shm', 'nixl' or 'inline' is needed",
    ]


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("frontend:\n  options: {port: 3}", "3: frontend.options.port: state it as "
         "`http.port`"),
        ("frontend:\n  options: {mm-arena-gb: -1}", "3: frontend.options.mm-arena-gb: "
         "must be at least 0"),
        ("frontend:\n  options: {mm_arena_gb: 1}", "3: frontend.options.mm_arena_gb: "
         "write it mm-arena-gb"),
        ("frontend:\n  options: {mm-transfer-timeout: 1}",
         "3: frontend.options.mm-transfer-timeout: is an option of workers"),
        ("workers:\n- options: {engine: foo}",
         "3: workers.0.options.engine: 'vllm' or 'mock' is needed"),
        ("workers:\n- options: {mm-arena-gb: 1}",
         "3: workers.0.options.mm-arena-gb: is an option of the frontend"),
        ("workers:\n- options: {model: x}",
         "3: workers.0.options.model: state it as `model` at the top"),
        ("engine:\n  router-mode: kv", "3: engine.router-mode: state it as `router.mode`"),
        ("engine:\n  mm-arena-gb: 1",
         "3: engine.mm-arena-gb: is Foveal's, not the engine's: make it an option"),
        ("workers:\n- count: 2\n  options: {port: 5601}",
         "4: workers.0.options.port: 2 workers cannot share it: take 0"),
        ("workers:\n- gpus: 0.5", "3: workers.0.gpus: parts of a GPU are for "
         "`launcher: ray`"),
        ("security:\n  secure-keys: k\n  insecure: true",
         "4: security.insecure: contradicts `secure-keys`"),
        ("launcher: ray", "2: launcher: workers that Ray places are found by `discovery`, "
         "or by a `registry` directory that all nodes share"),
        ("discovery: etcd://h:1\nworkers:\n- count: 2",
         "4: workers.0.options: with `discovery`, workers need a `port` (0: any that is "
         "free)"),
    ],
)
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, text: str, complaint: str
) -> None:
    assert problems(tmp_path, f"model: m\n{text}\n") == [complaint]


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("http: {port: x}", "2: http.port: a whole number is needed"),
        ("http: 8000", "2: http: keys with values are needed"),
        ("http:", "2: http: has no value"),
        ("router: {temperature: hot}", "2: router.temperature: a number is needed"),
        ("security: {insecure: maybe}", "2: security.insecure: true or false is needed"),
        ("workers: {count: 2}", "2: workers: a list is needed"),
        ("workers: []", "2: workers: must not be empty"),
        ("workers: [{options: {port: }}]", "2: workers.0.options.port: has no value"),
        ("engine: {day: 2020-01-01}", "2: engine.day: text, a number, true, false, a list "
         "or keys with values is needed"),
        ("environment: {A: [1]}", "2: environment.A: text is needed"),
        ("start-timeout: 0", "2: start-timeout: must be more than 0"),
        ("namespace:\n  - a", "2: namespace: text is needed"),
    ],
)
def test_a_value_of_another_kind_is_one_plain_sentence(
    tmp_path: Path, text: str, complaint: str
) -> None:
    assert problems(tmp_path, f"model: m\n{text}\n") == [complaint]


def test_a_value_can_be_changed_from_outside(tmp_path: Path) -> None:
    text = "model: m\nworkers:\n- count: 1\n"
    deployment = read(
        tmp_path, text, "workers.0.count=3", "http.port=81", "engine.dtype=float32",
        "workers.0.options.hf-overrides={a: 1}",
    ).deployment
    assert deployment.worker_count == 3
    assert deployment.http.port == 81
    assert deployment.engine == {"dtype": "float32"}
    assert deployment.workers[0].options == {"hf-overrides": {"a": 1}}


@pytest.mark.parametrize(
    "override, complaint",
    [
        ("workers.0.count=0", "--set workers.0.count: must be at least 1"),
        ("model", "--set model: write KEY=VALUE, as in workers.0.count=2"),
        ("workers.7.count=1", "--set workers.7.count=1: there is no such place in the file"),
        ("nothing=1", "--set nothing: there is no such key"),
        ("a.b.c=1", "--set a: there is no such key"),
    ],
)
def test_a_change_that_is_wrong_is_named_as_such(
    tmp_path: Path, override: str, complaint: str
) -> None:
    text = "model: m\nworkers:\n- count: 1\n"
    assert problems(tmp_path, text, override) == [complaint]


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(BadDeployment, match="No such file or directory"):
        read_deployment(tmp_path / "absent.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadDeployment, match="it is not UTF-8 text"):
        read_deployment(tmp_path / "binary.yaml")
    assert problems(tmp_path, "model: [\n")[0].startswith("2: ")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_file_explains_itself_and_names_no_machine(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("# ")
    addresses: list[Any] = re.findall(r"\d+\.\d+\.\d+\.\d+", text)
    assert set(addresses) <= {"0.0.0.0", "127.0.0.1"}
