"""Settings from the command line, the environment and defaults, in that order.

The only place that reads our environment variables.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from configs.complaints import complaint_of

S = TypeVar("S", bound=BaseModel)


class BadSetting(ValueError):
    """A value that makes no sense; its text is one sentence for the user."""


def add_flags(parser: argparse.ArgumentParser, settings: type[BaseModel]) -> None:
    """Add one flag for each field of ``settings``; its value stays None when not given."""
    group = parser.add_argument_group("Foveal", settings.__doc__)
    for name, field in settings.model_fields.items():
        env = _env_name(field)
        text = field.description or ""
        if field.default not in (None, ()) and field.default is not False:
            text += f" Default: {field.default}."
        if env:
            text += f" Environment: {env}."
        group.add_argument(
            flag_of(name),
            dest=name,
            default=None,
            help=text.replace("%", "%%"),
            **_taken(field),
        )


def read_settings(
    settings: type[S], args: argparse.Namespace, environ: Mapping[str, str]
) -> S:
    """Build ``settings`` from parsed flags and the environment.

    Raises:
        BadSetting: a value does not fit; the text names the flag or variable.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, field in settings.model_fields.items():
        env = _env_name(field)
        given = getattr(args, name, None)
        if given is not None:
            values[name], sources[name] = given, flag_of(name)
        elif env and environ.get(env):
            values[name], sources[name] = environ[env], f"environment variable {env}"
    try:
        return settings(**values)
    except ValidationError as error:
        problem = error.errors()[0]
        name = str(problem["loc"][0])
        raise BadSetting(
            f"{sources.get(name, flag_of(name))}={values.get(name)}: {complaint_of(problem)}"
        ) from error


def sentence_of(error: Exception) -> str:
    """What ``error`` complains about, in one line: for settings that others validate."""
    if isinstance(error, ValidationError):
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        return f"{where}: {problem['msg']}" if where else str(problem["msg"])
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def flag_of(name: str) -> str:
    """The flag of a field: ``router_mode`` -> ``--router-mode``."""
    return "--" + name.replace("_", "-")


def _env_name(field: FieldInfo) -> str | None:
    extra = field.json_schema_extra
    return str(extra["env"]) if isinstance(extra, dict) and extra.get("env") else None


def _taken(field: FieldInfo) -> dict[str, Any]:
    """How many values a flag takes, and what help calls them."""
    if field.annotation is bool:
        return {"action": "store_const", "const": True}
    if get_origin(field.annotation) is tuple:
        return {"action": "extend", "nargs": "+", "metavar": _metavar(field)}
    return {"metavar": _metavar(field)}


def _metavar(field: FieldInfo) -> str:
    choices = get_args(field.annotation)
    if choices and all(isinstance(choice, str) for choice in choices):
        return "{" + ",".join(choices) + "}"
    return "VALUE"
