"""What the demo says while it works."""

import contextlib
import shutil
import sys
import time


class Progress:
    """One line that is rewritten on a terminal; elsewhere, a line for each change."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._rewrites = sys.stdout.isatty()
        self._status = ""
        self._said_at = 0.0

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._began

    def say(self, text: str) -> None:
        self._write(("\r\x1b[K" if self._status and self._rewrites else "") + text + "\n")
        self._status = ""

    def status(self, text: str) -> None:
        """Say what is waited for; the same again is said every 15 s where lines add up."""
        line = f"{self.elapsed:4.0f} s  {text}"
        if self._rewrites:
            width = shutil.get_terminal_size().columns - 1
            self._write(f"\r\x1b[K{line[:width]}")
        elif text != self._status or self.elapsed - self._said_at >= 15:
            self._write(line + "\n")
            self._said_at = self.elapsed
        self._status = text

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal may be gone; stopping goes on
            sys.stdout.write(text)
            sys.stdout.flush()
