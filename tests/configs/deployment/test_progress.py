"""What is said while a deployment starts, on a terminal and in a file."""

from __future__ import annotations

import io

from rich.console import Console

from configs.deployment.progress import Progress, Row


def test_in_a_file_only_changes_are_said() -> None:
    output = io.StringIO()
    progress = Progress(Console(file=output, soft_wrap=True, width=40))
    long = "waiting: frontend loading, 0 of 2 workers ready (logs: /a/long/way)"
    for summary in ("one", "one", long, long):
        progress.show(summary, [Row("worker-1", "starting", "loading")])
    progress.say("Started worker-1, process 12 [bold]")
    progress.close()
    assert output.getvalue().splitlines() == [
        "   0 s  one", f"   0 s  {long}", "Started worker-1, process 12 [bold]"
    ]


def test_on_a_terminal_each_process_has_a_line_with_the_end_of_its_log() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=60, height=20)
    progress = Progress(console)
    detail = "\x1b[32mLoading shards: 50% [red]" + "x" * 100
    progress.show("waiting", [Row("worker-1", "starting", detail)])
    progress.say("Started")
    progress.close()
    text = output.getvalue()
    assert "worker-1" in text and "Loading shards: 50% [red]" in text
    assert "Started" in text.splitlines()[-1]
    # The table is gone, and the cursor is back.
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1
