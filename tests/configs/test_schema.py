"""The settings themselves: each stated once, with a meaning, and nothing else accepted."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ValidationError

from configs.schema import FrontendConfig, WorkerConfig

BOTH = pytest.mark.parametrize("settings", [FrontendConfig, WorkerConfig])


@BOTH
def test_every_setting_has_a_default_and_a_meaning(settings: type[BaseModel]) -> None:
    settings()
    for name, field in settings.model_fields.items():
        assert field.description, name
        assert not field.is_required(), name


@BOTH
def test_unknown_settings_are_refused(settings: type[BaseModel]) -> None:
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        settings(router_mood="kv")  # type: ignore[call-arg]


@BOTH
def test_settings_do_not_change_once_they_are_read(settings: type[BaseModel]) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        settings().namespace = "other"  # type: ignore[attr-defined]


def test_no_two_settings_come_from_one_variable() -> None:
    for settings in (FrontendConfig, WorkerConfig):
        extras = [field.json_schema_extra for field in settings.model_fields.values()]
        names = [e["env"] for e in extras if isinstance(e, dict) and e["env"]]
        assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("router_mode", "fastest"),
        ("mm_transfer", "pigeon"),
        ("mm_identity_hash", "md5"),
        ("dyn_chat_processor", "rust"),
        ("http_port", 0),
        ("http_port", 65536),
        ("mm_arena_gb", -1),
        ("mm_arena_gb", "inf"),
        ("mm_arena_gb", "nan"),
        ("router_temperature", -0.1),
        ("router_temperature", "nan"),
        ("router_kv_overlap_score_credit", 1.1),
        ("router_prefill_load_scale", -1),
        ("worker_wait_timeout", -1),
        ("namespace", "a/b"),
        ("namespace", ""),
        ("namespace", ".." * 40),
    ],
)
def test_values_without_sense_are_refused(name: str, value: object) -> None:
    with pytest.raises(ValidationError):
        FrontendConfig.model_validate({name: value})


def test_texts_become_what_they_stand_for() -> None:
    settings = FrontendConfig.model_validate(
        {"http_port": "8080", "mm_arena_gb": "1.5", "registry": "/tmp/x"}
    )
    assert (settings.http_port, settings.mm_arena_gb) == (8080, 1.5)
    assert str(settings.registry) == "/tmp/x"
