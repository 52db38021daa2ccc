"""``python -m frontend.preprocess.template FD``: starts preprocess processes.

It loads the model's processor once, processes one image, and then forks itself for every
process that is asked for. So a process is there within milliseconds, where loading takes
many seconds, and all share what was loaded. What makes forking safe is that this process
has one thread: whatever would start more is told not to, and it never sees an image of a
client.

vLLM names relied on: MULTIMODAL_REGISTRY.create_processor.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal, NoReturn

from frontend.preprocess.freed_memory import MIB, keep_freed_memory
from frontend.preprocess.messages import (
    BlockingLine,
    Setup,
    SetupFailed,
    TemplateReady,
    decode,
    encode,
)
from frontend.preprocess.process_loop import Processor, work_until_alone
from transfer.arena_writer import ArenaWriter
from transfer.errors import BadMessage
from transfer.identity import IdentityHasher
from transfer.parent_death import die_with_parent

NICENESS = 5
"""Of processes of low priority: others get about three times as much of a processor."""

SETUP_BYTES = 1 << 20
"""The longest setup message: command lines are shorter."""

KEPT_BYTES = 128 * MIB
"""Freed memory that a process keeps for its next image, which goes through several copies."""

Load = Callable[[Sequence[str]], tuple[Processor, str]]
"""From the frontend's command line to the processor and the model's name."""


def load(arguments: Sequence[str]) -> tuple[Processor, str]:
    """Load the processor of the model that the frontend serves, and run it once."""
    import torch
    from vllm.multimodal import MULTIMODAL_REGISTRY

    from frontend.command_line import parse
    from frontend.preprocess.item_processor import ItemProcessor
    from frontend.vllm_seams import frontend_config

    torch.set_num_threads(1)
    _, args = parse(arguments)
    config = frontend_config(args).model_config
    processor = ItemProcessor(MULTIMODAL_REGISTRY.create_processor(config))
    processor.warm()
    return processor, config.model


def run(control: socket.socket, load: Load) -> None:
    """Load, say so, and start a process for every socket that arrives."""
    die_with_parent()
    keep_freed_memory(KEPT_BYTES)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the frontend decides when to end
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits: leave no zombies
    setup = decode(control.recv(SETUP_BYTES))
    if not isinstance(setup, Setup):
        raise BadMessage(f"{type(setup).__name__} where a setup was due")
    try:
        hasher = IdentityHasher(setup.seed, setup.algorithm)  # type: ignore[arg-type]
        arena = ArenaWriter(setup.arena)
        processor, model = load(setup.arguments)
        if (threads := threads_of_this_process()) > 1:
            raise RuntimeError(f"loading left {threads} threads, so forking is not safe")
    except Exception as error:  # told to the frontend, which goes on without
        control.sendall(encode(SetupFailed(f"{type(error).__name__}: {error}")))
        return
    give_way(setup.priority)  # from here on: nothing is ready before this has loaded
    gc.collect()
    gc.freeze()  # or else the collector would write to, and so copy, every shared page
    control.sendall(encode(TemplateReady()))

    def work(fd: int) -> None:
        line = BlockingLine(socket.socket(fileno=fd))
        work_until_alone(line, processor, arena, hasher, model)

    while True:
        asked, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not asked:
            return
        if os.fork() == 0:
            control.close()
            _be_process(work, fds[0])
        for fd in fds:
            os.close(fd)


def give_way(priority: Literal["idle", "low"]) -> None:
    """Leave the processors to whoever answers requests.

    ``idle``: whoever wakes up has a processor at once. A thread of the frontend that had to
    wait for one would keep others waiting, for the interpreter lock that it may hold. Where
    a sandbox refuses that, ``low`` it is.
    """
    if priority == "idle":
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            return
    os.nice(NICENESS)


def _be_process(work: Callable[[int], None], fd: int) -> NoReturn:
    """Work in the process just forked, and end without the template's clearing up."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        die_with_parent()
        work(fd)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def threads_of_this_process() -> int:
    """All threads, also those that Python knows nothing of."""
    return max(threading.active_count(), len(os.listdir("/proc/self/task")))


def main() -> int:
    with socket.socket(fileno=int(sys.argv[1])) as control:
        run(control, load)
    return 0


if __name__ == "__main__":
    sys.exit(main())
