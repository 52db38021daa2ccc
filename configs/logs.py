"""Log lines of our packages, in the shape of vLLM's, or all of them as JSON.

With ``--log-format json`` every line of a process is one JSON object, vLLM's and uvicorn's
included: these read ``logs-json.json`` themselves.
"""

from __future__ import annotations

import argparse
import json
import logging.config
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from configs.schema import LogFormat

OURS = ("frontend", "transfer", "workers")
JSON_CONFIG = Path(__file__).with_name("logs-json.json")


def show_logs(process: str, log_format: LogFormat = "text") -> None:
    """Write our packages' log lines to standard error, marked with ``process``."""
    if log_format == "json":
        logging.config.dictConfig(_json_config())
        return
    logging.config.dictConfig({
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "line": {
                "format": f"({process} pid=%(process)d) %(levelname)s %(asctime)s "
                "[%(name)s] %(message)s",
                "datefmt": "%m-%d %H:%M:%S",
            }
        },
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
        "loggers": {
            name: {"handlers": ["stderr"], "level": "INFO", "propagate": False}
            for name in OURS
        },
    })


def early_log_format(arguments: Sequence[str], environ: Mapping[str, str]) -> LogFormat:
    """The format as far as it is known before flags are parsed and vLLM is imported."""
    for place, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag.replace("_", "-") == "--log-format":
            given = value if equals else next(iter(arguments[place + 1 : place + 2]), "")
            return "json" if given == "json" else "text"
    return "json" if environ.get("FOVEAL_LOG_FORMAT") == "json" else "text"


def have_vllm_log_json(environ: MutableMapping[str, str]) -> None:
    """Have vLLM, once it is imported, write JSON too, in this process and its children.

    An operator's own configuration of vLLM's logging comes first.
    """
    environ.setdefault("VLLM_LOGGING_CONFIG_PATH", str(JSON_CONFIG))


def use_json_config(args: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """The same for flags of vLLM that are parsed already, unless the operator chose."""
    chosen = getattr(args, "log_config_file", None) or environ.get("VLLM_LOGGING_CONFIG_PATH")
    args.log_config_file = chosen or str(JSON_CONFIG)


def _json_config() -> dict[str, Any]:
    """Of the file, what concerns us: vLLM and uvicorn read it for themselves."""
    config: dict[str, Any] = json.loads(JSON_CONFIG.read_text())
    config["loggers"] = {name: config["loggers"][name] for name in OURS}
    return config
