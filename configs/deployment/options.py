"""Options of a process as a file states them: long names of flags with their values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, PydanticUserError, TypeAdapter, ValidationError

from configs.complaints import complaint_of
from configs.flags import flag_of

Value = str | int | float | bool | list[str | int | float] | dict[str, Any]
Options = dict[str, Value]


def flags_of(options: Mapping[str, Value]) -> list[str]:
    """As arguments: true is the bare flag, false its ``--no-`` form, a mapping is JSON."""
    arguments: list[str] = []
    for name, value in options.items():
        flag = f"--{name}"
        if value is True:
            arguments.append(flag)
        elif value is False:
            arguments.append(f"--no-{name}")
        elif isinstance(value, list):
            arguments += [flag, *map(str, value)]
        elif isinstance(value, dict):
            arguments += [flag, json.dumps(value)]
        else:
            arguments += [flag, str(value)]
    return arguments


def problems_of(
    options: Mapping[str, Value], settings: type[BaseModel], elsewhere: Mapping[str, str]
) -> dict[str, str]:
    """What is wrong with ``options``, by name.

    Only settings of ours are looked at; the others are vLLM's to judge. ``elsewhere`` says
    under which key of the file a flag is stated instead.
    """
    found: dict[str, str] = {}
    by_flag = {flag_of(name)[2:]: name for name in settings.model_fields}
    for option, value in options.items():
        if option.startswith("-") or "_" in option:
            found[option] = f"write it {option.lstrip('-').replace('_', '-')}"
        elif option in elsewhere:
            found[option] = f"state it as {elsewhere[option]}"
        elif option in by_flag and (reason := _misfit(settings, by_flag[option], value)):
            found[option] = reason
    return found


def _misfit(settings: type[BaseModel], name: str, value: Value) -> str:
    field = settings.model_fields[name]
    try:
        annotation: Any = Annotated[field.annotation, field]
        TypeAdapter(annotation).validate_python(value)
    except ValidationError as error:
        return complaint_of(error.errors()[0])
    except PydanticUserError:
        pass
    return ""
