"""From the command line to our settings and vLLM's.

vLLM names relied on: launchers.cli_args.make_arg_parser, validate_parsed_serve_args;
FlexibleArgumentParser.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

from configs.flags import BadSetting, add_flags, read_settings
from configs.logs import use_json_config
from configs.schema import FrontendConfig

LOOPBACK = "127.0.0.1"
"""Where HTTP is served unless told otherwise."""

_MEANT_FOR_WORKERS = {
    "data_parallel_size": (1, None),
    "api_server_count": (1, None),
    "headless": (False,),
    "grpc": (False,),
}
"""vLLM's flags that make no sense here, and the values that leave them unset."""


def parse(arguments: Sequence[str]) -> tuple[FrontendConfig, argparse.Namespace]:
    """Split a command line into our settings and those of ``vllm serve``.

    Raises:
        BadSetting: a value makes no sense; the text is one sentence.
    """
    parser = FlexibleArgumentParser(
        prog="python -m frontend",
        description="OpenAI-compatible frontend for a fleet of vLLM workers. Takes every "
        "flag of vllm serve that concerns the API server, the renderer and the model.",
    )
    make_arg_parser(parser)
    add_flags(parser, FrontendConfig)
    args = parser.parse_args(list(arguments))
    settings = read_settings(FrontendConfig, args, os.environ)
    if args.model_tag is not None:
        args.model = args.model_tag
    for name, unset in _MEANT_FOR_WORKERS.items():
        if getattr(args, name) not in unset:
            raise BadSetting(f"--{name.replace('_', '-')} is not supported by the frontend")
    if args.uds and settings.frontends > 1:
        raise BadSetting("--frontends above 1 needs a port: --uds cannot be shared")
    try:
        validate_parsed_serve_args(args)
    except (TypeError, ValueError) as error:
        raise BadSetting(str(error).removeprefix("Error: ")) from error
    if settings.log_format == "json":
        use_json_config(args, os.environ)
    # vLLM's flags for the same two come before our environment variables.
    unset = args.port == parser.get_default("port")
    if settings.http_port is not None and (unset or args.http_port is not None):
        args.port = settings.http_port
    if args.host is None or args.http_host is not None:
        args.host = settings.http_host or LOOPBACK
    return settings, args
