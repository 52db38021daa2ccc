"""What pydantic finds wrong with a value, in words for whoever wrote it."""

from __future__ import annotations

from typing import Any

from pydantic_core import ErrorDetails

SENTENCES = {
    "missing": "must be given",
    "int_parsing": "a whole number is needed", "int_type": "a whole number is needed",
    "int_from_float": "a whole number is needed",
    "float_parsing": "a number is needed", "float_type": "a number is needed",
    "bool_parsing": "true or false is needed", "bool_type": "true or false is needed",
    "string_type": "text is needed",
    "path_type": "a path is needed",
    "list_type": "a list is needed", "tuple_type": "a list is needed",
    "dict_type": "keys with values are needed", "model_type": "keys with values are needed",
    "literal_error": "{expected} is needed",
    "greater_than": "must be more than {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be less than {lt:g}",
    "less_than_equal": "must be at most {le:g}",
    "too_short": "must not be empty", "string_too_short": "must not be empty",
}


def complaint_of(problem: ErrorDetails | dict[str, Any]) -> str:
    """One sentence without a capital letter; never the value, which may be a secret."""
    if problem["type"] != "missing" and problem.get("input", "") is None:
        return "has no value"
    if problem["type"] in SENTENCES:
        return SENTENCES[problem["type"]].format(**problem.get("ctx", {}))
    text = str(problem["msg"]).removeprefix("Value error, ")
    return text[:1].lower() + text[1:]
