"""A headless Chromium, driven over W3C WebDriver as plain HTTP."""

from __future__ import annotations

import base64
import json
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from tests.e2e.processes import free_port

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""The key under which WebDriver names elements."""

PATIENCE = 20.0
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--force-color-profile=srgb",
)


def missing() -> str:
    """What is not installed; empty when a browser can be driven."""
    lacking = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"not installed: {', '.join(lacking)}" if lacking else ""


class Browser:
    """One window with a profile of its own; a context that ends it and leaves nothing."""

    def __init__(self, *, dark: bool = False) -> None:
        self._profile = tempfile.mkdtemp(prefix="foveal-browser-")
        port = free_port()
        self._driver = subprocess.Popen(
            ["chromedriver", f"--port={port}"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            env={"PATH": "/usr/bin:/bin", "HOME": self._profile, "TMPDIR": self._profile},
        )
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
        self._session = ""
        try:
            self._begin(dark)
        except BaseException:
            self.close()
            raise

    def _begin(self, dark: bool) -> None:
        until(self._is_up, "chromedriver to answer")
        flags = [*FLAGS, f"--user-data-dir={self._profile}/profile"]
        if dark:
            flags.append("--force-dark-mode")
        options = {"args": flags, "binary": shutil.which("chromium")}
        capabilities = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        answer = self._http.post(
            "/session", json={"capabilities": {"alwaysMatch": capabilities}}
        )
        answer.raise_for_status()
        self._session = f"/session/{answer.json()['value']['sessionId']}"

    def _is_up(self) -> bool:
        with suppress(httpx.TransportError):
            return bool(self._http.get("/status").json()["value"]["ready"])
        return False

    def open(self, url: str) -> None:
        self._command("url", {"url": url})

    def resize(self, width: int, height: int) -> None:
        """Set the size of the page in CSS pixels, whatever the window's least."""
        self._devtools(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )

    def color_scheme(self, scheme: str) -> None:
        """``light`` or ``dark``, as the system would prefer it."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self._devtools("Emulation.setEmulatedMedia", features=[feature])

    def run(self, script: str) -> Any:
        """Run the body of a function in the page; returns what it returns."""
        return self._command("execute/sync", {"script": script, "args": []})

    def text(self, selector: str) -> str:
        """The visible text of the first element that ``selector`` finds; empty for none."""
        place = json.dumps(selector)
        return str(self.run(f"return document.querySelector({place})?.innerText ?? ''"))

    def count(self, selector: str) -> int:
        place = json.dumps(selector)
        return int(self.run(f"return document.querySelectorAll({place}).length"))

    def click(self, selector: str) -> None:
        self._command(f"element/{self._find(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        self._command(f"element/{self._find(selector)}/value", {"text": text})

    def wait(self, selector: str, containing: str = "") -> None:
        """Wait until an element is there and visible, with ``containing`` in its text."""
        until(
            lambda: self.count(selector) > 0 and containing in self.text(selector),
            f"{selector} with {containing!r}",
        )

    def complaints(self) -> list[str]:
        """Errors on the page's console since it was last asked; not those of the network."""
        entries = self._command("se/log", {"type": "browser"})
        return [
            e["message"]
            for e in entries
            if e["level"] == "SEVERE" and e["source"] != "network"
        ]

    def screenshot(self, path: Path) -> None:
        """What is in view, as PNG."""
        answer = self._devtools("Page.captureScreenshot")
        path.write_bytes(base64.b64decode(answer["data"]))

    def close(self) -> None:
        with suppress(httpx.HTTPError):
            if self._session:
                self._http.delete(self._session)
        self._http.close()
        with suppress(ProcessLookupError):
            self._driver.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._driver.wait(10)
        self._driver.kill()
        self._driver.wait(10)
        shutil.rmtree(self._profile, ignore_errors=True)

    def _find(self, selector: str) -> str:
        found = self._command("element", {"using": "css selector", "value": selector})
        return str(found[ELEMENT])

    def _devtools(self, command: str, **parameters: Any) -> Any:
        return self._command("goog/cdp/execute", {"cmd": command, "params": parameters})

    def _command(self, name: str, body: dict[str, Any]) -> Any:
        answer = self._http.post(f"{self._session}/{name}", json=body)
        value = answer.json()["value"]
        if answer.status_code != 200:
            raise AssertionError(f"{name}: {value['error']}: {value['message'][:500]}")
        return value

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def until(condition: Callable[[], bool], what: str) -> None:
    """Raises: TimeoutError: it has not come true."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {PATIENCE:.0f} s for {what}")
        time.sleep(0.05)
