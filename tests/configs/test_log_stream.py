"""Output comes out whole and in order, and nobody waits for it."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading

from configs.log_stream import QueuedStream

PATIENCE = 20.0

SAYS = """
import logging, sys
from configs.log_stream import queue_output, replace_output
replace_output()
queue_output()
logging.basicConfig(stream=sys.stderr)
for number in range(1000):
    print("line", number)
logging.warning("a warning")
assert sys.stdout.fileno() == 1 and not sys.stdout.isatty()
raise SystemExit("the last words")
"""


def test_all_of_it_is_out_when_the_process_ends() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SAYS], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.stdout == "".join(f"line {number}\n" for number in range(1000))
    assert ended.stderr == "WARNING:root:a warning\nthe last words\n"
    assert ended.returncode == 1


FORKS = """
import os
from configs.log_stream import queue_output, replace_output
replace_output()
queue_output()
print("parent")
if (child := os.fork()) == 0:
    print("child")
    raise SystemExit
os.waitpid(child, 0)
"""


def test_what_a_forked_child_says_is_written_once() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=60, check=True
    )
    assert sorted(ended.stdout.splitlines()) == ["child", "parent"]


ODD = """
import atexit, logging, sys
from configs.log_stream import queue_output, replace_output
atexit.register(lambda: logging.warning("the very last"))
replace_output()
queue_output()
logging.basicConfig(stream=sys.stderr)
print("before")
print("half of a pair: \\ud83d")
try:
    sys.stdout.write(b"bytes")
except TypeError:
    print("after")
"""


def test_what_cannot_be_written_costs_no_other_line() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ODD], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == "before\nhalf of a pair: \\ud83d\nafter\n"
    assert ended.stderr == "WARNING:root:the very last\n"


ENDS_AT_ONCE = """
import multiprocessing
from configs.log_stream import queue_output, replace_output
replace_output()
queue_output()
child = multiprocessing.get_context("fork").Process(target=print, args=("child",))
child.start()
child.join()
"""


HELPS = """
import threading
from configs.log_stream import queue_output, replace_output
replace_output()
print("help", threading.active_count())
queue_output()
print("serving")
print(threading.active_count())
"""


def test_what_comes_before_serving_is_waited_for() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HELPS], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == "help 1\nserving\n2\n"
    stream = QueuedStream(written := io.StringIO(), queues=False)
    stream.write("help")
    assert written.getvalue() == "help"


def test_forked_children_may_end_without_notice() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ENDS_AT_ONCE],
        capture_output=True, text=True, timeout=60, check=True,
    )
    assert ended.stdout == "child\n"


CLOSED = """
import os, sys
assert sys.stdout is None
from configs.log_stream import queue_output, replace_output
replace_output()
queue_output()
print("to nobody")
print("still here", file=sys.stderr)
"""


def test_streams_that_were_closed_at_the_start_stay_so() -> None:
    ended = subprocess.run(
        ["sh", "-c", 'exec "$0" -c "$1" >&-', sys.executable, CLOSED],
        capture_output=True, text=True, timeout=60, check=True,
    )
    assert ended.stderr == "still here\n"


def test_a_child_that_becomes_another_program_starts_no_thread() -> None:
    stream = QueuedStream(io.StringIO())
    stream.write("parent")
    assert stream.drain(PATIENCE)
    if (child := os.fork()) == 0:
        os._exit(threading.active_count())
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 1


def test_a_reader_that_does_not_read_stops_nobody() -> None:
    reading, writing = os.pipe()
    with open(writing, "w") as pipe, open(reading) as reader:
        line = "x" * (1 << 17) + "\n"
        stream = QueuedStream(pipe, most_waiting=10 * len(line))
        for _ in range(1000):  # a pipe does not hold one of these
            stream.write(line)
        assert not stream.drain(0.01)
        lines: list[str] = []
        reading_thread = threading.Thread(target=lambda: lines.extend(reader))
        reading_thread.start()
        assert stream.drain(PATIENCE)
        pipe.close()
        reading_thread.join(PATIENCE)
    dropped = [line for line in lines if line.startswith("... ")]
    written = [each for each in lines if each == line]
    assert len(written) < 30
    assert sum(int(each.split()[1]) for each in dropped) + len(written) == 1000


def test_a_stream_that_is_closed_is_no_error() -> None:
    closed = io.StringIO()
    closed.close()
    stream = QueuedStream(closed)
    stream.write("lost")
    assert stream.drain(PATIENCE)
