"""Log lines of our packages, in the shape of vLLM's."""

from __future__ import annotations

import logging.config


def show_logs(process: str) -> None:
    """Write our packages' log lines to standard error, marked with ``process``."""
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
            for name in ("frontend", "transfer", "workers")
        },
    })
