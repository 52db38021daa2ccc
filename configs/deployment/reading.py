"""From a file to a ``Deployment``, or to all that is wrong with it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from configs.complaints import complaint_of
from configs.deployment.options import problems_of
from configs.deployment.positions import BadYaml, Document, dotted, read_yaml
from configs.deployment.schema import Deployment
from configs.schema import FrontendConfig, WorkerConfig

STATED_AT_THE_TOP = {
    "model": "`model` at the top", "namespace": "`namespace` at the top",
    "served-model-name": "`served-model-name` at the top",
    "registry": "`registry` at the top", "discovery": "`discovery` at the top",
    "mm-transfer": "`transfer` at the top", "log-format": "`logs.format`",
    "http-host": "`http.host`", "http-port": "`http.port`", "frontends": "`frontend.count`",
    "secure-keys": "`security.secure-keys`", "insecure": "`security.insecure`",
    "config": "options here: one file says it all",
    **{
        name.replace("_", "-"): f"`router.{name.removeprefix('router_').replace('_', '-')}`"
        for name in FrontendConfig.model_fields
        if name.startswith("router_")
    },
}
OPTION_VALUES = "text, a number, true, false, a list or keys with values is needed"
OF_THE_FRONTEND = {"host": "`http.host`", "port": "`http.port`"}


@dataclass(frozen=True)
class DeploymentFile:
    """A deployment that is right in itself, and where its keys stand."""

    path: Path
    deployment: Deployment
    document: Document
    overrides: frozenset[str]

    @property
    def name(self) -> str:
        return self.path.stem

    def complain(self, path: Sequence[str | int], text: str) -> str:
        """``FILE:LINE: KEY: text``, or the override that brought it."""
        return _where(self.path, self.document, self.overrides, path) + text


class BadDeployment(ValueError):
    """The file cannot be used; ``problems`` has a line for each reason."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


def read_deployment(path: Path, overrides: Sequence[str] = ()) -> DeploymentFile:
    """Read ``path``; ``overrides`` are ``KEY=VALUE`` with dotted keys and YAML values.

    Raises:
        BadDeployment: something is wrong; all of it is listed, in the order of the lines.
    """
    try:
        document = read_yaml(path.read_text())
    except BadYaml as error:
        raise BadDeployment([f"{path}:{error.problem.line}: {error.problem.text}"]) from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise BadDeployment([f"{path}: {reason}"]) from error
    changed = frozenset(_override(document.values, text) for text in overrides)
    try:
        deployment = Deployment.model_validate(document.values)
    except ValidationError as error:
        found = list(_misfits(error, document))
    else:
        found = list(_disagreements(deployment))
        if not found:
            return DeploymentFile(path, deployment, document, changed)
    found.sort(key=lambda problem: document.line_of(_known(problem[0], document)))
    texts = [
        _where(path, document, changed, location) + text for location, text in found
    ]
    raise BadDeployment(list(dict.fromkeys(texts)))


def _override(values: dict[str, Any], text: str) -> str:
    """Change one value as ``KEY=VALUE`` says; returns the key."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise BadDeployment([f"--set {text}: write KEY=VALUE, as in workers.0.count=2"])
    place: Any = values
    parts = key.split(".")
    try:
        new = yaml.safe_load(value)
        for part in parts[:-1]:
            if isinstance(place, list):
                place = place[int(part)]
            elif isinstance(place.get(part), dict | list):
                place = place[part]
            else:
                place[part] = place = {}
        if isinstance(place, list):
            place[int(parts[-1])] = new
        else:
            place[parts[-1]] = new
    except (yaml.YAMLError, AttributeError, IndexError, TypeError, ValueError) as error:
        raise BadDeployment([f"--set {text}: there is no such place in the file"]) from error
    return key


def _disagreements(deployment: Deployment) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """What each key allows but not all of them together."""
    on_top = STATED_AT_THE_TOP
    frontend, workers = deployment.frontend.options, deployment.workers
    for name, text in problems_of(deployment.engine, FrontendConfig, on_top).items():
        yield ("engine", name), text
    for name in set(deployment.engine) & _flags(FrontendConfig, WorkerConfig) - set(on_top):
        yield ("engine", name), "is Foveal's, not the engine's: make it an option"
    elsewhere = {**on_top, **OF_THE_FRONTEND}
    for name, text in problems_of(frontend, FrontendConfig, elsewhere).items():
        yield ("frontend", "options", name), text
    for name in set(frontend) & (_flags(WorkerConfig) - _flags(FrontendConfig)):
        if name not in OF_THE_FRONTEND:
            yield ("frontend", "options", name), "is an option of workers"
    for place, group in enumerate(workers):
        here = ("workers", place, "options")
        for name, text in problems_of(group.options, WorkerConfig, on_top).items():
            yield (*here, name), text
        for name in set(group.options) & (_flags(FrontendConfig) - _flags(WorkerConfig)):
            if name not in on_top:
                yield (*here, name), "is an option of the frontend"
        port = group.options.get("port")
        if deployment.discovery and deployment.launcher == "process" and port is None:
            yield here, "with `discovery`, workers need a `port` (0: any that is free)"
        if isinstance(port, int) and port > 0 and group.count > 1:
            yield (*here, "port"), f"{group.count} workers cannot share it: take 0"
        if group.gpus % 1 and deployment.launcher != "ray":
            yield ("workers", place, "gpus"), "parts of a GPU are for `launcher: ray`"
    security = deployment.security
    if security.secure_keys and security.insecure:
        yield ("security", "insecure"), "contradicts `secure-keys`"
    if deployment.launcher == "ray" and not (deployment.discovery or deployment.registry):
        yield ("launcher",), (
            "workers that Ray places are found by `discovery`, or by a `registry` "
            "directory that all nodes share"
        )


def _flags(*settings: type[BaseModel]) -> set[str]:
    return {name.replace("_", "-") for each in settings for name in each.model_fields}


def _misfits(
    error: ValidationError, document: Document
) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """One problem for each key: of a value that may be of several kinds, pydantic tells why
    it is none of them, kind by kind."""
    found: dict[tuple[str | int, ...], list[Any]] = {}
    for problem in error.errors():
        path = tuple(problem["loc"])
        key = path
        if "options" in path[:-2] or path[:1] == ("engine",):
            key = _known(path, document)
        found.setdefault(key, []).append(problem)
    for key, problems in found.items():
        several = len(problems) > 1 and problems[0].get("input", "") is not None
        yield key, OPTION_VALUES if several else _reason(problems[0])


def _reason(problem: Any) -> str:
    if problem["type"] != "extra_forbidden":
        return complaint_of(problem)
    *around, name = problem["loc"]
    near = difflib.get_close_matches(str(name), _keys_at(around), 1)
    return "there is no such key" + (f"; is it {near[0]}?" if near else "")


def _keys_at(path: Sequence[str | int]) -> list[str]:
    """The keys that a mapping at ``path`` may have."""
    model: Any = Deployment
    for part in path:
        if isinstance(part, int):
            continue
        fields = {f.alias or name: f for name, f in model.model_fields.items()}
        model = fields[part].annotation
        model = getattr(model, "__args__", (model,))[0]
    return [field.alias or name for name, field in model.model_fields.items()]


def _known(path: Sequence[str | int], document: Document) -> tuple[str | int, ...]:
    """``path`` as far as the file has it: pydantic adds which kind of value it tried."""
    for length in range(len(path), 0, -1):
        if tuple(path[:length]) in document.lines:
            return tuple(path[:length])
    return tuple(path[:1])


def _where(
    file: Path, document: Document, overrides: frozenset[str], path: Sequence[str | int]
) -> str:
    for length in range(len(path), 0, -1):
        if (key := dotted(path[:length])) in overrides:
            return f"--set {key}: "
    known = _known(path, document)
    deeper = dotted(path) + "."
    if tuple(path) not in document.lines and any(k.startswith(deeper) for k in overrides):
        return f"--set {dotted(path)}: "
    missing = tuple(path[:-1]) == known[: len(path) - 1] and known != tuple(path)
    shown = dotted(path if missing else known)
    return f"{file}:{document.line_of(known)}: {shown}: "
