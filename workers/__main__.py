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
        settings, args = parse(sys.argv[1:])
        if settings.engine == "mock":
            from workers.mock.process import run_mock_workers

            show_logs("mock worker")
            return run_mock_workers(settings, args)
        return run_worker(settings, args)
    except (BadSetting, TransferError) as error:
        print(f"python -m workers: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
