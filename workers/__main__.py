"""``python -m workers``: one vLLM engine behind Foveal frontends."""

import os
import sys

from configs.logs import early_log_format, have_vllm_log_json, show_logs


def main() -> int:
    log_format = early_log_format(sys.argv[1:], os.environ)
    if log_format == "json":
        have_vllm_log_json(os.environ)
    # Before anything heavy is imported, so that --help of a broken install still works.
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup

    cli_env_setup()

    from configs.flags import BadSetting
    from transfer.errors import TransferError
    from workers.engine_args import parse
    from workers.worker_process import run_worker

    show_logs("worker", log_format)
    try:
        settings, args = parse(sys.argv[1:])
        show_logs("worker", settings.log_format)
        if settings.engine == "mock":
            from workers.mock.process import run_mock_workers

            show_logs("mock worker", settings.log_format)
            return run_mock_workers(settings, args)
        return run_worker(settings, args)
    except (BadSetting, TransferError) as error:
        print(f"python -m workers: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
