"""What one file of a deployment may say; docs/deployment.md explains it with examples.

Keys are these fields with hyphens for underscores. Settings of ours that a process takes
as flags are not repeated here: they are options of the frontend and of the workers, and
checked against ``configs.schema``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model

from configs.deployment.options import Options
from configs.schema import FrontendConfig, LogFormat, TransferMode

ROUTER_PREFIX = "router_"
Environment = dict[str, str]


def _hyphens(name: str) -> str:
    return name.replace("_", "-")


class _Part(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=_hyphens, protected_namespaces=(),
        coerce_numbers_to_str=True, hide_input_in_errors=True,
    )


def _router_settings() -> Any:
    """The router's settings of the frontend, without their prefix."""
    fields: dict[str, Any] = {
        name.removeprefix(ROUTER_PREFIX): (field.annotation, field)
        for name, field in FrontendConfig.model_fields.items()
        if name.startswith(ROUTER_PREFIX)
    }
    return create_model("Router", __base__=_Part, **fields)


Router: Any = _router_settings()


class Http(_Part):
    """Where the API is served."""

    host: str = Field("127.0.0.1", description="Address; 0.0.0.0 for all of this host.")
    port: int = Field(8000, ge=1, le=65535, description="Port.")


class Frontend(_Part):
    """The frontends. They need no GPU."""

    count: int = Field(1, ge=1, le=64, description="Processes behind the one port.")
    options: Options = Field(
        {}, description="Flags of `python -m frontend`, ours or of `vllm serve`."
    )
    environment: Environment = Field({}, description="Variables for this process alone.")


class Workers(_Part):
    """Some workers that are alike. Each is one vLLM engine."""

    count: int = Field(1, ge=1, le=1024, description="How many.")
    gpus: float = Field(
        0, ge=0,
        description="GPUs of each: that many of CUDA_VISIBLE_DEVICES one worker after the "
        "other, or reserved by Ray (0.5 is half of one, by Ray only). 0: none is set.",
    )
    options: Options = Field(
        {}, description="Flags of `python -m workers`, ours or of vLLM's engine."
    )
    environment: Environment = Field({}, description="Variables for these workers alone.")


class Security(_Part):
    """How frontends and workers know each other."""

    secure_keys: Path | None = Field(
        None, description="Directory of keys, made by `python -m transfer.make_keys DIR`."
    )
    insecure: bool = Field(
        False, description="Serve workers' TCP ports without keys, on a network you trust."
    )


class Prepare(_Part):
    """A command to run first, on the host of `foveal up`."""

    command: list[str] = Field(
        min_length=1, description='The command; a first word "python" is our own Python.'
    )
    makes: Path | None = Field(
        None, description="Where this is there already, the command is not run."
    )


class Ray(_Part):
    """Which Ray cluster `launcher: ray` uses."""

    address: str = Field(
        "auto", description="Address of the head, or auto: the cluster of this host."
    )
    resources: dict[str, float] = Field(
        {}, description="Custom resources that each worker reserves, besides its GPUs."
    )
    cpus: float = Field(1, ge=0, description="CPUs that each worker reserves.")


class Logs(_Part):
    """What the processes say."""

    directory: Path | None = Field(
        None, description="Where their logs go, one file each (default: under `directory`)."
    )
    format: LogFormat = Field("text", description="Lines for people, or JSON objects.")


def _json_fits(options: Options) -> Options:
    json.dumps(options)  # dates, which YAML has and flags have not, raise TypeError
    return options


class Deployment(_Part):
    """One deployment."""

    model: str = Field(min_length=1, description="Directory or name of the model.")
    served_model_name: str | None = Field(None, description="What clients call it.")
    namespace: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")] = Field(
        "default", description="Workers and frontends of one namespace find each other."
    )
    registry: Path | None = Field(
        None,
        description="Directory where they do, for several `foveal up` on one host (default: "
        "a private one that ends with the command).",
    )
    discovery: Annotated[str, Field(pattern=r"^etcds?://\S+$")] | None = Field(
        None, description="etcd where they do, for several hosts: etcd://host:port."
    )
    http: Http = Field(Http.model_validate({}), description="Where the API is served.")
    transfer: TransferMode = Field("auto", description="How tensors reach workers.")
    router: Router = Field(Router.model_validate({}), description="How a worker is chosen.")
    security: Security = Field(
        Security.model_validate({}), description="Keys of the workers' ports."
    )
    engine: Annotated[Options, AfterValidator(_json_fits)] = Field(
        {}, description="vLLM's flags in which frontend and workers must agree."
    )
    frontend: Frontend = Field(Frontend.model_validate({}), description="The frontends.")
    workers: list[Workers] = Field(
        [Workers.model_validate({})],
        min_length=1,
        description="Groups of workers that are alike.",
    )
    launcher: Literal["process", "ray"] = Field(
        "process", description="Who starts workers: this host, or a Ray cluster."
    )
    ray: Ray = Field(Ray.model_validate({}), description="The cluster, for `launcher: ray`.")
    environment: Environment = Field({}, description="Variables for all processes.")
    prepare: list[Prepare] = Field([], description="Commands to run first.")
    directory: Path | None = Field(
        None, description="Where logs and a sample request go (default: .foveal/NAME)."
    )
    logs: Logs = Field(Logs.model_validate({}), description="What the processes say.")
    note: str = Field("", description="Said in the ready line.")
    start_timeout: float = Field(
        900.0, gt=0, description="Seconds after which a start that is not ready has failed."
    )

    @property
    def worker_count(self) -> int:
        return sum(group.count for group in self.workers)

    @property
    def expected_workers(self) -> int:
        """How many a frontend sees; one process may be many mock workers."""
        return sum(
            group.count * int(str(group.options.get("mock-workers", 1)))
            for group in self.workers
        )
