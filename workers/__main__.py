"""``python -m workers``: one vLLM engine behind Foveal frontends."""

import sys


def main() -> int:
    # Before anything heavy is imported, so that --help of a broken install still works.
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup

    cli_env_setup()

    from configs.flags import BadSetting
    from configs.logs import show_logs
    from transfer.errors import TransferError
    from workers.engine_args import parse
    from workers.worker_process import run_worker

    show_logs("worker")
    try:
        return run_worker(*parse(sys.argv[1:]))
    except (BadSetting, TransferError) as error:
        print(f"python -m workers: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
