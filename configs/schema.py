"""Every setting of our own, each stated once.

Flags, help texts, environment names and keys of the YAML files are derived from these
fields (``configs.flags``). vLLM's own flags are not repeated here: both commands take
them beside these.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

RouterMode = Literal["kv", "round-robin", "random", "least-loaded"]
LogFormat = Literal["text", "json"]
TransferMode = Literal["auto", "shm", "nixl", "inline"]


def setting(default: Any, help: str, *, env: str | None = None, **limits: Any) -> Any:
    """A field with its one-line meaning and the environment variable it may come from."""
    return Field(default=default, description=help, json_schema_extra={"env": env}, **limits)


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class DiscoverySettings(_Settings):
    """Where frontends and workers find each other."""

    namespace: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")] = setting(
        "default", "Workers and frontends of one namespace find each other.",
        env="DYN_NAMESPACE",
    )
    registry: Path | None = setting(
        None,
        "Directory where workers announce themselves (default: one per user under "
        "XDG_RUNTIME_DIR or the temporary directory).",
        env="FOVEAL_REGISTRY",
    )
    discovery: Annotated[str, Field(pattern=r"^etcds?://\S+$")] | None = setting(
        None,
        "etcd in which workers on any host announce themselves, instead of the registry "
        "directory: etcd://host:port[,host:port], etcd://user:password@..., etcds:// for "
        "TLS.",
        env="FOVEAL_DISCOVERY",
    )
    mm_identity_seed_file: Path | None = setting(
        None,
        "File with the secret seed of image identities, the same for a whole deployment "
        "(default: made once, in the registry directory or in etcd).",
        env="FOVEAL_MM_IDENTITY_SEED_FILE",
    )
    secure_keys: Path | None = setting(
        None,
        "Directory of keys made by python -m transfer.make_keys: requests and KV events "
        "over TCP are encrypted, and only between holders of these keys.",
        env="FOVEAL_SECURE_KEYS",
    )
    log_format: LogFormat = setting(
        "text", "Log lines for people, or one JSON object each.", env="FOVEAL_LOG_FORMAT"
    )


class FrontendConfig(DiscoverySettings):
    """Settings of ``python -m frontend``."""

    dyn_chat_processor: Literal["vllm"] = setting(
        "vllm", "Who renders chats and processes images: vLLM's own code.",
        env="DYN_CHAT_PROCESSOR",
    )
    http_host: str | None = setting(
        None,
        "Address to serve HTTP on, 0.0.0.0 for all (same as vLLM's --host; default "
        "127.0.0.1).",
        env="DYN_HTTP_HOST",
    )
    http_port: int | None = setting(
        None, "Port to serve HTTP on (same as vLLM's --port; default 8000).",
        env="DYN_HTTP_PORT", ge=1, le=65535,
    )
    frontends: int = setting(
        1,
        "Frontend processes behind one port, each with an arena of its own.",
        env="FOVEAL_FRONTENDS", ge=1, le=64,
    )
    router_mode: RouterMode = setting(
        "kv", "How a worker is chosen for a request.", env="DYN_ROUTER_MODE"
    )
    router_kv_overlap_score_credit: float = setting(
        1.0, "How much of a cached prompt token counts as already computed, 0 to 1.",
        env="DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT", ge=0.0, le=1.0,
    )
    router_prefill_load_scale: float = setting(
        1.0, "Weight of this request's prefill against the load already there.",
        env="DYN_ROUTER_PREFILL_LOAD_SCALE", ge=0.0,
    )
    router_encoder_load_scale: float = setting(
        0.5,
        "Encoding one token of an image against one token of prefill. 0: it does not "
        "matter who has encoded an image before.",
        env="FOVEAL_ROUTER_ENCODER_LOAD_SCALE", ge=0.0,
    )
    router_temperature: float = setting(
        0.0, "0 takes the cheapest worker; above 0, a softmax over the costs.",
        env="DYN_ROUTER_TEMPERATURE", ge=0.0,
    )
    mm_transfer: TransferMode = setting(
        "auto",
        "How processed tensors reach workers: auto picks shared memory where the worker "
        "can see it, else NIXL where it works, else inline.",
        env="DYNAMO_MM_TRANSFER",
    )
    mm_arena_gb: float | None = setting(
        None,
        "Shared memory for processed tensors of each frontend process, GiB (default: the "
        "smaller of 4 and half of what /dev/shm has free, divided among --frontends; 0: "
        "none).",
        env="FOVEAL_MM_ARENA_GB", ge=0.0,
    )
    mm_identity_hash: Literal["xxh3_128", "blake3"] = setting(
        "xxh3_128", "Hash behind image identities.", env="FOVEAL_MM_IDENTITY_HASH"
    )
    mm_url_cache_gb: float = setting(
        0.5, "Memory for media fetched from URLs, kept as HTTP allows, GiB (0: none).",
        env="FOVEAL_MM_URL_CACHE_GB", ge=0.0,
    )
    mm_url_private_addresses: Literal["refuse", "allow"] = setting(
        "refuse",
        "Whether media may be fetched from this host and private networks. Hosts listed "
        "in vLLM's --allowed-media-domains may be there in any case.",
        env="FOVEAL_MM_URL_PRIVATE_ADDRESSES",
    )
    mm_preprocess_workers: int | None = setting(
        None,
        "Processes that decode and process images beside the frontend's own (default: as "
        "many as processors, divided among --frontends, at most 4, none on one; 0: none).",
        env="FOVEAL_MM_PREPROCESS_WORKERS", ge=0, le=64,
    )
    mm_preprocess_priority: Literal["idle", "low"] = setting(
        "idle",
        "When preprocess processes get a processor: when nobody else wants it, or somewhat "
        "less often than others (low), for hosts whose engines keep all processors busy.",
        env="FOVEAL_MM_PREPROCESS_PRIORITY",
    )
    mm_preprocess_queue: int = setting(
        1024, "Images that may wait for a preprocess process before requests are answered "
        "503.", ge=1,
    )
    mm_preprocess_timeout: float = setting(
        60.0, "Seconds an image may wait and be processed before its request is answered "
        "503.", gt=0.0,
    )
    max_request_mb: float = setting(
        64.0, "Largest body of an HTTP request, MiB; larger ones are refused unread (413).",
        env="FOVEAL_MAX_REQUEST_MB", gt=0.0,
    )
    max_requests: int = setting(
        4096,
        "HTTP requests that one frontend process works on at a time; beyond it, 503.",
        env="FOVEAL_MAX_REQUESTS", ge=1,
    )
    max_bodies_gb: float = setting(
        2.0,
        "Bodies of the HTTP requests that one frontend process works on and media fetched "
        "for them, together, GiB; beyond it, 503.",
        env="FOVEAL_MAX_BODIES_GB", gt=0.0,
    )
    max_body_seconds: float = setting(
        120.0, "Seconds that the body of an HTTP request may take to arrive; then 408.",
        gt=0.0,
    )
    max_requests_per_worker: int | None = setting(
        None,
        "Requests in flight from all frontends, for each ready worker; beyond it, 429 "
        "(default: no limit).",
        env="FOVEAL_MAX_REQUESTS_PER_WORKER", ge=1,
    )
    max_prefill_tokens_per_worker: int | None = setting(
        None,
        "Prompt tokens still to be computed for all frontends, for each ready worker; "
        "beyond it, 429 (default: no limit).",
        env="FOVEAL_MAX_PREFILL_TOKENS_PER_WORKER", ge=1,
    )
    dashboard_requests: int = setting(
        100,
        "Requests that the dashboard at /dashboard shows, the last of each frontend "
        "process (0: no dashboard).",
        env="FOVEAL_DASHBOARD_REQUESTS", ge=0, le=1000,
    )
    dashboard_thumbnails: Literal["off", "on"] = setting(
        "off",
        "Whether the dashboard shows small copies of the pictures in requests, to whoever "
        "may see the dashboard.",
        env="FOVEAL_DASHBOARD_THUMBNAILS",
    )
    worker: tuple[str, ...] = setting(
        (), "Address of a worker, tcp://host:port, besides those in the registry. May be "
        "repeated.",
    )
    worker_wait_timeout: float = setting(
        30.0, "Seconds a request waits for a first worker before it is answered 503.",
        ge=0.0,
    )
    migration_limit: int = setting(
        3,
        "How many workers may be lost under one request before it is given up. 0: none.",
        env="DYN_MIGRATION_LIMIT", ge=0,
    )
    drain_timeout: float = setting(
        25.0,
        "Seconds that answers under way may take when this process is told to end. It "
        "accepts no connections meanwhile.",
        env="FOVEAL_DRAIN_TIMEOUT", ge=0.0,
    )


class WorkerConfig(DiscoverySettings):
    """Settings of ``python -m workers``."""

    host: str = setting(
        "127.0.0.1", "Address to listen on when --port is given.", env="FOVEAL_WORKER_HOST"
    )
    port: int | None = setting(
        None,
        "TCP port for requests; KV events take a free one (default: sockets in the "
        "registry directory, for frontends of the same host).",
        env="FOVEAL_WORKER_PORT", ge=0, le=65535,
    )
    insecure: bool = setting(
        False,
        "Listen beyond this host without --secure-keys: whoever reaches the ports reads "
        "prompts and sends requests.",
    )
    role: Literal["generate", "encode"] = setting(
        "generate",
        "generate answers requests; encode runs the vision encoder only, for the other "
        "workers of its host or, by NIXL, of another, and needs "
        "--multimodal-embedding-cache-capacity-gb.",
        env="FOVEAL_WORKER_ROLE",
    )
    mm_worker_cache_gb: float | None = setting(
        None,
        "Shared memory for tensors pulled by NIXL from frontends on other hosts, and for "
        "encoder outputs on their way between hosts, GiB; taken when the first is to be "
        "pulled (default: the smaller of 4 and half of what "
        "/dev/shm has free; 0: no NIXL).",
        env="FOVEAL_MM_WORKER_CACHE_GB", ge=0.0,
    )
    multimodal_embedding_cache_capacity_gb: float = setting(
        0.0,
        "Shared memory for outputs of the vision encoder, which all workers of this host "
        "and model write and read, GiB in all; taken as it is used (0: none).",
        env="FOVEAL_MULTIMODAL_EMBEDDING_CACHE_CAPACITY_GB", ge=0.0,
    )
    mm_transfer_timeout: float = setting(
        5.0,
        "Seconds that a request waits for its tensors to be pulled before they are sent "
        "with it.",
        env="FOVEAL_MM_TRANSFER_TIMEOUT", gt=0.0,
    )
    drain_timeout: float = setting(
        25.0,
        "Seconds that requests under way may take when this worker is told to end. It gets "
        "no new ones meanwhile, and what is not done by then goes on elsewhere.",
        env="FOVEAL_DRAIN_TIMEOUT", ge=0.0,
    )
    engine: Literal["vllm", "mock"] = setting(
        "vllm",
        "vllm, or mock: a simulated engine that makes its answers up, for tests of scale.",
        env="FOVEAL_WORKER_ENGINE",
    )
    mock_workers: int = setting(
        1, "How many workers this process is, with --engine mock.", ge=1, le=1024
    )
    mock_speed: float = setting(
        1.0, "How many simulated seconds pass in one, with --engine mock.", gt=0.0
    )
