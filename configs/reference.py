"""Writes docs/flags.md: every key of a deployment's file, every flag and variable of ours.

    python -m configs.reference > docs/flags.md        (or: make docs-flags)
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from configs.deployment.schema import Deployment
from configs.flags import flag_of
from configs.schema import DiscoverySettings, FrontendConfig, WorkerConfig

INTRODUCTION = """\
# Flags and keys

<!-- Written by `make docs-flags` from configs/schema.py and configs/deployment/schema.py;
a test compares. Change those. -->

A flag comes before its environment variable, and that before the default. In a file for
`--config` a flag is a key without its `--`. All of vLLM's own flags are taken, too:
`python -m frontend --help` and `python -m workers --help` list them.
"""
OF_THE_FILE = """\
## Keys of a deployment's file

What `foveal up FILE` reads; [deployment.md](deployment.md) explains it with examples.
Options are flags of the two commands above, ours or vLLM's, without their `--`.
"""


def reference() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    shared = set(DiscoverySettings.model_fields)
    for title, settings, names in (
        ("Flags of both", FrontendConfig, [n for n in FrontendConfig.model_fields
                                           if n in shared]),
        ("Flags of `python -m frontend`", FrontendConfig,
         [n for n in FrontendConfig.model_fields if n not in shared]),
        ("Flags of `python -m workers`", WorkerConfig,
         [n for n in WorkerConfig.model_fields if n not in shared]),
    ):
        rows = [_flag_row(name, settings.model_fields[name]) for name in names]
        parts.append(
            f"## {title}\n\n| Flag | Value | Default | Variable | Meaning |\n"
            "|---|---|---|---|---|\n" + "\n".join(rows) + "\n"
        )
    rows = list(_key_rows(Deployment, ""))
    parts.append(
        f"{OF_THE_FILE}\n| Key | Value | Default | Meaning |\n|---|---|---|---|\n"
        + "\n".join(rows) + "\n"
    )
    return "\n".join(parts)


def _flag_row(name: str, field: FieldInfo) -> str:
    extra = field.json_schema_extra
    env = extra.get("env") if isinstance(extra, dict) else None
    cells = (
        f"`{flag_of(name)}`", _kind(field.annotation), _default(field),
        f"`{env}`" if env else "", field.description or "",
    )
    return _row(cells)


def _key_rows(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        key = prefix + (field.alias or name)
        inner, several = _model_in(field.annotation)
        if inner is None:
            cells = (
                f"`{key}`", _kind(field.annotation), _default(field), field.description or ""
            )
            yield _row(cells)
            continue
        kind = "list" if several else "mapping"
        yield _row((f"`{key}`", kind, "", field.description or ""))
        yield from _key_rows(inner, f"{key}[]." if several else f"{key}.")


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _model_in(kind: Any) -> tuple[type[BaseModel] | None, bool]:
    if get_origin(kind) is list:
        return _model_in(get_args(kind)[0])[0], True
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind, False
    return None, False


def _default(field: FieldInfo) -> str:
    default = field.default
    if default is PydanticUndefined:
        return "(must be given)"
    if default is None or default in ("", (), [], {}):
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _kind(kind: Any) -> str:
    """A type in the words of a user."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _kind(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin in (Union, types.UnionType):
        named = [_kind(part) for part in arguments if part is not type(None)]
        return " or ".join(dict.fromkeys(named)) if len(named) < 4 else "any"
    if origin in (tuple, list):
        return "several"
    if origin is dict:
        return "mapping"
    return {
        bool: "true or false", int: "whole number", float: "number", Path: "path"
    }.get(kind, "text")


if __name__ == "__main__":
    print(reference(), end="")
