"""A page in headless Chromium, spoken to over a pipe.

Source: https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_LONGEST_S = 60.0
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-dev-shm-usage",
)


def missing() -> bool:
    """Whether there is no Chromium here."""
    return _program() is None


def _program() -> str | None:
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Page:
    """One page of a browser of its own."""

    def __init__(self, width: int, height: int, *, dark: bool = False) -> None:
        """Start it.

        Args:
            width: of the window, in CSS pixels; below 600 it is a phone with two device pixels for each.
            height: of the window.
            dark: what the system prefers.
        """
        self._folder = tempfile.mkdtemp(prefix="autotune-chromium-")
        (theirs_in, self._out), (self._in, theirs_out) = os.pipe(), os.pipe()
        flags = (*_FLAGS, f"--user-data-dir={self._folder}", "--remote-debugging-pipe", "about:blank")
        command = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, "bash", str(_program()), *flags],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._number, self._read, self._session = 0, b"", ""
        self.complaints: list[str] = []
        """Errors in the page's console, and exceptions."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")
        is_phone = width < 600
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._out)  # it ends with its pipe
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        shutil.rmtree(self._folder, ignore_errors=True)

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol.

        Raises:
            RuntimeError: it was refused, or the browser has gone.
        """
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        found: dict[str, Any] = answer["result"]
        return found

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            part = os.read(self._in, 2**20)
            if not part:
                raise RuntimeError("the browser has gone")
            self._read += part
        text, _, self._read = self._read.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params)[:2500])
        if event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def evaluate(self, script: str) -> Any:
        """What JavaScript comes to; a promise is waited for.

        Raises:
            RuntimeError: it throws.
        """
        found = self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(json.dumps(found["exceptionDetails"])[:500])
        return found["result"].get("value")

    def until(self, script: str) -> float:
        """Wait until JavaScript says so; the seconds that it took.

        Raises:
            TimeoutError: it does not.
        """
        began = time.monotonic()
        while not self.evaluate(script):
            if time.monotonic() - began > _LONGEST_S:
                raise TimeoutError(f"waited {_LONGEST_S:.0f} s for {script}: {self.complaints}")
            time.sleep(0.01)
        return time.monotonic() - began

    def press(self, key: str) -> None:
        """A key of the keyboard, such as ``Tab`` or ``ArrowRight``."""
        code = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowRight": 39}[key]
        for kind in ("rawKeyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """A PNG of the window, or of the ``whole`` page."""
        taken = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(taken["data"]))
