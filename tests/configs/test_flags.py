"""Flag before environment before default; a bad value is named in one sentence."""

from __future__ import annotations

import argparse

import pytest
from pydantic import BaseModel, ValidationError

from configs.flags import BadSetting, add_flags, flag_of, read_settings, sentence_of
from configs.schema import FrontendConfig, WorkerConfig


def read(
    *arguments: str, settings: type[BaseModel] = FrontendConfig, **environ: str
) -> BaseModel:
    parser = argparse.ArgumentParser()
    add_flags(parser, settings)
    return read_settings(settings, parser.parse_args(arguments), environ)


def test_without_anything_given_the_defaults_hold() -> None:
    assert read() == FrontendConfig()
    assert read(settings=WorkerConfig) == WorkerConfig()


@pytest.mark.parametrize(
    ("variable", "name", "text", "value"),
    [
        ("DYN_ROUTER_MODE", "router_mode", "random", "random"),
        ("DYN_HTTP_PORT", "http_port", "8123", 8123),
        ("DYN_HTTP_HOST", "http_host", "0.0.0.0", "0.0.0.0"),
        ("DYNAMO_MM_TRANSFER", "mm_transfer", "inline", "inline"),
        ("DYN_NAMESPACE", "namespace", "qwen", "qwen"),
        ("DYN_CHAT_PROCESSOR", "dyn_chat_processor", "vllm", "vllm"),
        ("DYN_ROUTER_TEMPERATURE", "router_temperature", "0.5", 0.5),
        ("FOVEAL_MM_ARENA_GB", "mm_arena_gb", "2", 2.0),
    ],
)
def test_a_variable_stands_where_no_flag_is_given(
    variable: str, name: str, text: str, value: object
) -> None:
    assert getattr(read(**{variable: text}), name) == value


def test_a_flag_comes_before_the_variable() -> None:
    settings = read(
        "--router-mode",
        "random",
        "--namespace",
        "a",
        DYN_ROUTER_MODE="least-loaded",
        DYN_NAMESPACE="b",
    )
    assert isinstance(settings, FrontendConfig)
    assert (settings.router_mode, settings.namespace) == ("random", "a")


def test_an_empty_variable_counts_as_none() -> None:
    assert read(DYN_ROUTER_MODE="") == FrontendConfig()


def test_a_bad_variable_does_not_matter_where_a_flag_is_given() -> None:
    assert read("--http-port", "1", DYN_HTTP_PORT="x") == FrontendConfig(http_port=1)


def test_a_flag_may_be_repeated_or_take_several_values() -> None:
    settings = read("--worker", "tcp://a:1", "--worker", "tcp://b:2", "tcp://c:3")
    assert isinstance(settings, FrontendConfig)
    assert settings.worker == ("tcp://a:1", "tcp://b:2", "tcp://c:3")


@pytest.mark.parametrize(
    ("arguments", "environ", "start"),
    [
        (["--router-mode", "fastest"], {}, "--router-mode=fastest: 'kv', "),
        (["--http-port", "x"], {}, "--http-port=x: a whole number is needed"),
        (["--mm-arena-gb", "-1"], {}, "--mm-arena-gb=-1: must be at least 0"),
        ([], {"DYN_HTTP_PORT": "0"}, "environment variable DYN_HTTP_PORT=0: must be"),
        ([], {"DYN_CHAT_PROCESSOR": "rust"}, "environment variable DYN_CHAT_PROCESSOR=rust: "),
        (
            [],
            {"DYN_NAMESPACE": "a/b"},
            "environment variable DYN_NAMESPACE=a/b: string should",
        ),
    ],
)
def test_a_bad_value_is_one_sentence_that_names_where_it_came_from(
    arguments: list[str], environ: dict[str, str], start: str
) -> None:
    with pytest.raises(BadSetting) as caught:
        read(*arguments, **environ)
    text = str(caught.value)
    assert text.startswith(start)
    assert "\n" not in text


def test_help_tells_of_every_flag_its_default_and_its_variable() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, FrontendConfig)
    help_ = " ".join(parser.format_help().split())
    for name in FrontendConfig.model_fields:
        assert flag_of(name) in help_
    assert "{kv,round-robin,random,least-loaded}" in help_
    assert "Default: kv. Environment: DYN_ROUTER_MODE." in help_


def test_a_default_of_zero_is_told() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, FrontendConfig)
    assert "a softmax over the costs. Default: 0.0." in " ".join(parser.format_help().split())


def test_a_switch_takes_no_value() -> None:
    assert read(settings=WorkerConfig) == WorkerConfig(insecure=False)
    assert read("--insecure", settings=WorkerConfig) == WorkerConfig(insecure=True)


def test_what_others_complain_of_becomes_one_line() -> None:
    with pytest.raises(ValidationError) as caught:
        FrontendConfig(http_port=0)
    assert sentence_of(caught.value).startswith("http_port: Input should be")
    assert sentence_of(ValueError("\n  first\nsecond")) == "first"
    assert sentence_of(OSError()) == "OSError"
