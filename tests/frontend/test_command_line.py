"""The frontend's command line: our flags beside those of ``vllm serve``."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.deployment.commands import frontend_command
from configs.deployment.reading import read_deployment
from configs.flags import BadSetting
from configs.schema import FrontendConfig
from frontend.command_line import LOOPBACK, parse

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DYN_ROUTER_MODE", "DYN_HTTP_PORT", "DYN_HTTP_HOST", "DYN_NAMESPACE"):
        monkeypatch.delenv(name, raising=False)


def test_flags_of_both_are_taken() -> None:
    settings, args = parse(
        [
            "--model",
            "m",
            "--router-mode",
            "random",
            "--max-model-len",
            "4096",
            "--worker",
            "tcp://a:1",
            "--worker",
            "tcp://b:2",
        ]
    )
    assert settings.router_mode == "random"
    assert settings.worker == ("tcp://a:1", "tcp://b:2")
    assert (args.model, args.max_model_len) == ("m", 4096)


def test_the_model_may_stand_first_as_in_vllm_serve() -> None:
    _, args = parse(["some/model", "--dtype", "float32"])
    assert (args.model, args.dtype) == ("some/model", "float32")


@pytest.mark.parametrize("file", SHIPPED, ids=lambda path: path.stem)
def test_the_shipped_deployments_are_understood(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = read_deployment(file).deployment
    if deployment.security.secure_keys and "secure_keys" not in FrontendConfig.model_fields:
        pytest.skip("NO --secure-keys yet")
    command = frontend_command(deployment, None)
    for name, value in command.environment.items():
        monkeypatch.setenv(name, value)
    settings, args = parse(command.arguments)
    assert settings.discovery == deployment.discovery
    assert settings.router_mode == "kv"
    assert settings.namespace in ("qwen", "demo")
    assert args.model == deployment.model
    assert settings.mm_arena_gb in (1, 8)


def test_the_command_line_comes_before_the_file_and_the_file_before_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "frontend.yaml"
    file.write_text(
        'namespace: from-file\nrouter-mode: random\nworker: ["tcp://a:1", "tcp://b:2"]\n'
    )
    monkeypatch.setenv("DYN_NAMESPACE", "from-environment")
    monkeypatch.setenv("DYN_ROUTER_MODE", "round-robin")
    settings, _ = parse(["--config", str(file), "--router-mode", "kv"])
    assert settings.namespace == "from-file"
    assert settings.router_mode == "kv"
    assert settings.worker == ("tcp://a:1", "tcp://b:2")


def test_an_unknown_key_in_a_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "frontend.yaml"
    file.write_text("router-mood: kv\n")
    with pytest.raises(SystemExit):
        parse(["--config", str(file)])
    assert "--router-mood" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "variables", "address"),
    [
        ([], {}, (LOOPBACK, 8000)),
        (["--port", "9000", "--host", "0.0.0.0"], {}, ("0.0.0.0", 9000)),
        (["--http-port", "9001", "--http-host", "::1"], {}, ("::1", 9001)),
        ([], {"DYN_HTTP_PORT": "9002", "DYN_HTTP_HOST": "10.0.0.1"}, ("10.0.0.1", 9002)),
        (
            ["--port", "9000", "--host", "0.0.0.0"],
            {"DYN_HTTP_PORT": "9002", "DYN_HTTP_HOST": "10.0.0.1"},
            ("0.0.0.0", 9000),
        ),
        (
            ["--port", "9000", "--http-port", "9001"],
            {"DYN_HTTP_PORT": "9002"},
            (LOOPBACK, 9001),
        ),
    ],
)
def test_the_address_comes_from_either_flag_before_the_environment(
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    variables: dict[str, str],
    address: tuple[str, int],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    _, args = parse(arguments)
    assert (args.host, args.port) == address


@pytest.mark.parametrize(
    "arguments",
    [["--data-parallel-size", "2"], ["--api-server-count", "2"], ["--headless"], ["--grpc"]],
    ids=lambda arguments: arguments[0],
)
def test_what_is_meant_for_engines_is_refused_by_name(arguments: list[str]) -> None:
    with pytest.raises(BadSetting, match=f"^{arguments[0]} is not supported"):
        parse(arguments)


def test_what_makes_no_sense_to_vllm_is_one_sentence() -> None:
    with pytest.raises(BadSetting, match="--enable-auto-tool-choice requires") as caught:
        parse(["--enable-auto-tool-choice"])
    assert "\n" not in str(caught.value)


def test_a_bad_value_of_ours_names_the_flag() -> None:
    with pytest.raises(BadSetting, match=r"^--router-mode=fastest: "):
        parse(["--router-mode", "fastest"])
