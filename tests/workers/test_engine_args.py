"""From a worker's command line to an engine that frontends can route to."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from configs.demo.checkpoint import write_checkpoint
from configs.deployment.commands import on_node, worker_commands
from configs.deployment.reading import read_deployment
from configs.flags import BadSetting
from configs.logs import JSON_CONFIG
from configs.schema import WorkerConfig
from transfer.block_hash_root import root_hash_of
from workers.embedding_cache import connector_config
from workers.engine_args import WORKER_CLASSES, engine_config, facts_of, parse

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))
DEMO = (
    "--dtype", "float32", "--block-size", "32", "--max-model-len", "8192",
    "--max-num-seqs", "16", "--enforce-eager",
)


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    target = ROOT / ".demo" / "checkpoint"
    write_checkpoint(target)
    return target


def config_of(*arguments: str) -> VllmConfig:
    _, args = parse(arguments)
    return engine_config(args, Path("/tmp/sockets"))


@pytest.fixture(scope="module")
def config(checkpoint: Path) -> VllmConfig:
    return config_of(
        "--model", str(checkpoint), *DEMO
    )


def test_flags_of_both_are_taken() -> None:
    settings, args = parse(["--model", "m", "--port", "5601", "--max-num-seqs", "7"])
    assert (settings.port, settings.host) == (5601, "127.0.0.1")
    assert (args.model, args.max_num_seqs) == ("m", 7)


@pytest.mark.parametrize("file", SHIPPED, ids=lambda path: path.stem)
def test_the_shipped_deployments_are_understood(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = read_deployment(file).deployment
    needed = {"secure_keys": deployment.security.secure_keys,
              "insecure": deployment.security.insecure}
    for name in (name for name, wanted in needed.items() if wanted):
        if name not in WorkerConfig.model_fields:
            pytest.skip(f"NO {name} yet")
    for command in worker_commands(deployment, None):
        if deployment.launcher == "ray":
            command = on_node(command, "127.0.0.1")
        for name, value in command.environment.items():
            monkeypatch.setenv(name, value)
        settings, args = parse(command.arguments)
        assert settings.discovery == deployment.discovery
        assert settings.namespace in ("qwen", "demo")
        assert args.model == deployment.model
        assert args.dtype in ("bfloat16", "float32")


def test_with_etcd_a_worker_needs_a_port() -> None:
    with pytest.raises(BadSetting, match="give --host and --port, too"):
        parse(["--model", "m", "--discovery", "etcd://h:1"])
    settings, _ = parse(["--model", "m", "--discovery", "etcd://h:1", "--port", "0"])
    assert settings.discovery == "etcd://h:1"


def test_json_logs_are_vllms_too() -> None:
    _, args = parse(["--model", "m", "--log-format", "json"])
    assert args.log_config_file == str(JSON_CONFIG)
    _, args = parse(["--model", "m"])
    assert getattr(args, "log_config_file", None) != str(JSON_CONFIG)


def test_a_bad_value_of_ours_names_the_flag() -> None:
    with pytest.raises(BadSetting, match=r"^--port=99999: "):
        parse(["--port", "99999"])


def test_an_unknown_key_in_a_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "worker.yaml"
    file.write_text("prot: 1\n")
    with pytest.raises(SystemExit):
        parse(["--config", str(file)])
    assert "--prot" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--data-parallel-size", "2"], "start one worker per rank"),
        (["--no-enable-prefix-caching"], "nothing to route by"),
        (["--model", "/nowhere/at/all"], "nowhere"),
        (["--max-model-len", "-5"], "max.model.len"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_a_routed_worker_cannot_have_is_refused_in_one_sentence(
    checkpoint: Path, arguments: list[str], reason: str
) -> None:
    with pytest.raises(BadSetting, match=reason) as caught:
        config_of("--model", str(checkpoint), *arguments)
    assert "\n" not in str(caught.value)


def test_what_must_not_vary_is_set(config: VllmConfig) -> None:
    multimodal = config.model_config.multimodal_config
    assert multimodal is not None and multimodal.mm_processor_cache_gb == 0
    assert config.parallel_config.worker_cls == WORKER_CLASSES[current_platform.is_cpu()]
    assert config.cache_config.enable_prefix_caching
    assert config.cache_config.prefix_caching_hash_algo == "sha256_cbor"
    events = config.kv_events_config
    assert events is not None and events.enable_kv_cache_events
    assert (events.publisher, events.endpoint) == ("zmq", "ipc:///tmp/sockets/kv-events")


def test_a_worker_states_what_frontends_must_agree_on(
    config: VllmConfig, checkpoint: Path
) -> None:
    facts = facts_of(config, "fingerprint")
    assert facts.model == str(checkpoint)
    assert (facts.dtype, facts.block_size, facts.max_model_len) == ("float32", 32, 8192)
    assert facts.hash_algorithm == "sha256_cbor"
    assert facts.root_hash == root_hash_of("sha256_cbor")
    assert facts.max_num_seqs == 16
    assert facts.encoder_cache_tokens > 1000
    assert facts.identity_seed_fingerprint == "fingerprint"
    assert (facts.lora, facts.reasoning_parser, facts.revision) == ("", "", "")
    assert not facts.own_logits_processors


def test_a_worker_says_that_it_has_logits_processors_of_its_own(checkpoint: Path) -> None:
    config = config_of("--model", str(checkpoint), *DEMO, "--logits-processors", "some:Own")
    assert facts_of(config, "").own_logits_processors


def test_an_encode_worker_loads_no_language_model(checkpoint: Path) -> None:
    settings, args = parse([
        "--model", str(checkpoint), *DEMO,
        "--role", "encode", "--multimodal-embedding-cache-capacity-gb", "1",
    ])
    config = engine_config(args, Path("/tmp/sockets"), connector_config(settings))
    assert config.is_mm_encoder_only
    assert facts_of(config, "").role == "encode"


def test_a_worker_that_shares_outputs_generates(checkpoint: Path) -> None:
    settings, args = parse([
        "--model", str(checkpoint), *DEMO,
        "--multimodal-embedding-cache-capacity-gb", "1",
    ])
    config = engine_config(args, Path("/tmp/sockets"), connector_config(settings))
    assert not config.is_mm_encoder_only
    assert facts_of(config, "").role == "generate"
    args.ec_transfer_config = config.ec_transfer_config
    with pytest.raises(BadSetting, match="give one of them"):
        engine_config(args, Path("/tmp/sockets"), connector_config(settings))
