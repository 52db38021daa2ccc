"""``python -m frontend``: the OpenAI-compatible frontend."""

import os
import sys


def main() -> int:
    # A frontend runs no model. Told so, vLLM's CUDA build works on hosts without a GPU
    # and this process never touches one. vLLM reads it when it is imported.
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"
    # Ours (frontend/media/connector.py), unless the operator has chosen one.
    os.environ.setdefault("VLLM_MEDIA_CONNECTOR", "foveal")

    import uvloop
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup

    from configs.flags import BadSetting
    from configs.logs import show_logs
    from frontend.command_line import parse
    from frontend.server import serve
    from transfer.errors import TransferError

    cli_env_setup()
    show_logs("frontend")
    try:
        arguments = sys.argv[1:]
        uvloop.run(serve(*parse(arguments), arguments))
    except (BadSetting, TransferError) as error:
        print(f"python -m frontend: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
