"""From a command line to a running frontend, or to several.

vLLM names relied on: entrypoints.serve.utils.api_utils.cli_env_setup.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from configs.log_stream import queue_output, replace_output
from configs.logs import early_log_format, have_vllm_log_json, show_logs


def launch(arguments: Sequence[str], *, siblings: Path | None = None) -> int:
    """Serve until told to stop; returns the exit status.

    Where ``--frontends`` asks for several processes this one only looks after them, unless
    it is one of them itself: then ``siblings`` is the directory where they meet.
    """
    # A frontend runs no model. Told so, vLLM's CUDA build works on hosts without a GPU
    # and this process never touches one. vLLM reads it when it is imported.
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"
    replace_output()
    log_format = early_log_format(arguments, os.environ)
    if log_format == "json":
        have_vllm_log_json(os.environ)
    # Ours (frontend/media/connector.py), unless the operator has chosen one.
    os.environ.setdefault("VLLM_MEDIA_CONNECTOR", "foveal")
    # It would have vLLM unpickle what clients send to its token-in endpoint.
    os.environ.pop("VLLM_ALLOW_INSECURE_SERIALIZATION", None)

    import uvloop
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup

    from configs.flags import BadSetting
    from frontend.command_line import parse
    from frontend.port import reserved
    from frontend.server import serve
    from frontend.siblings import Siblings, meeting_place
    from frontend.supervisor import supervise
    from transfer.errors import TransferError

    cli_env_setup()
    show_logs("frontend", log_format)
    try:
        settings, args = parse(arguments)
        show_logs("frontend", settings.log_format)
        queue_output()
        if settings.frontends == 1 or siblings is not None:
            # Until vLLM's server listens for it: unwind, so that nothing is left behind.
            signal.signal(signal.SIGTERM, _interrupt)
            uvloop.run(serve(settings, args, arguments, Siblings(siblings)))
            return 0
        with (
            reserved(args.host, args.port),
            meeting_place() as directory,
        ):
            command = [
                sys.executable, "-m", "frontend.one_of_several", str(directory), *arguments
            ]
            return asyncio.run(supervise(command, settings.frontends, settings.drain_timeout))
    except (BadSetting, TransferError) as error:
        print(f"python -m frontend: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
