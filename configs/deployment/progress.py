"""What a deployment says while it starts and runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

SAME_AGAIN_SECONDS = 15.0


@dataclass(frozen=True)
class Row:
    """One process: what it is doing, and the last thing that its log says."""

    name: str
    state: str
    detail: str = ""


class Progress:
    """A table that is rewritten on a terminal; elsewhere, a line for each change."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(soft_wrap=True, highlight=False)
        self._began = time.monotonic()
        self._live: Live | None = None
        self._said = ""
        self._said_at = 0.0

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._began

    def say(self, text: str) -> None:
        """One event, a line of its own (or several)."""
        self._end_table()
        with contextlib.suppress(OSError):  # the terminal may be gone; stopping goes on
            self._console.print(escape(text))

    def show(self, summary: str, rows: Sequence[Row] = ()) -> None:
        """What is waited for; the same again is said every 15 s where lines add up."""
        with contextlib.suppress(OSError):
            if self._console.is_terminal:
                self._draw(summary, rows)
            elif summary != self._said or self.elapsed - self._said_at >= SAME_AGAIN_SECONDS:
                self._console.print(escape(f"{self.elapsed:4.0f} s  {summary}"))
                self._said, self._said_at = summary, self.elapsed

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._end_table()

    def _draw(self, summary: str, rows: Sequence[Row]) -> None:
        table = Table.grid(padding=(0, 2))
        for words in ([row.name for row in rows], [row.state for row in rows]):
            # Where room is short, it is the log that is cut.
            table.add_column(no_wrap=True, min_width=max(map(len, words), default=0))
        table.add_column(no_wrap=True, overflow="ellipsis", style="dim")
        for row in rows:
            # A log may have colours of its own.
            detail = Text.from_ansi(row.detail).plain
            table.add_row(row.name, row.state, escape(detail))
        outer = Table.grid()
        outer.add_row(Spinner("dots", f" {self.elapsed:4.0f} s  {escape(summary)}"))
        outer.add_row(table)
        if self._live is None:
            self._live = Live(console=self._console, transient=True, refresh_per_second=8)
            self._live.start()
        self._live.update(outer)

    def _end_table(self) -> None:
        if self._live is not None:
            with contextlib.suppress(OSError):
                self._live.stop()
            self._live = None
