"""Drives a headless Chromium over its debugging pipe: no driver, no package, no network."""

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-sync",
    "--no-first-run",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)


class Page:
    """One tab. `problems` collects exceptions, console errors and every request that is not to a local file."""

    def __init__(self, process: "subprocess.Popen[bytes]", reader: int, writer: int) -> None:
        self._process, self._reader, self._writer = process, reader, writer
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends a command and returns its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writer, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._reader, 1 << 20)
            assert part, f"Chromium ended with code {self._process.wait()}"
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, parameters: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.problems.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            url = parameters["request"]["url"]
            if not url.startswith(("file:", "data:", "about:", "blob:")):
                self.problems.append(f"request to {url}")

    def open(self, path: Path, *, width: int = 1280, height: int = 900, fragment: str = "", dark: bool = False) -> None:
        """Loads a local file at a window size and waits until it is complete."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        # A change of the fragment alone would not load the page again.
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=f"file://{path.resolve()}{fragment}")
        self.wait("location.protocol === 'file:' && document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """Evaluates an expression and returns its JSON value."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, condition: str, seconds: float = 20.0) -> None:
        """Waits until an expression is true; while a page loads it may fail."""
        deadline = time.monotonic() + seconds
        while not self.run(f"(() => {{ try {{ return Boolean({condition}); }} catch (error) {{ return false; }} }})()"):
            assert time.monotonic() < deadline, f"never true: {condition}"
            time.sleep(0.05)

    def click(self, selector: str) -> None:
        """Clicks the first element that matches."""
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def choose(self, selector: str, value: str) -> None:
        """Chooses an option of a select element."""
        self.run(
            f"(() => {{ const select = document.querySelector({json.dumps(selector)}); select.value = "
            f"{json.dumps(value)}; select.dispatchEvent(new Event('change')); }})()"
        )

    def overflow(self) -> int:
        """Returns by how many pixels the page is wider than its window."""
        return self.run("document.documentElement.scrollWidth - document.documentElement.clientWidth")


def open_browser() -> Iterator[Page]:
    """Starts Chromium for a fixture; skips with the reason where there is none."""
    program = next((found for name in _NAMES if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("Chromium is not installed; .ci/run installs it.")
    # Chromium reads commands from descriptor 3 and answers on descriptor 4.
    command_read, command_write = os.pipe()
    answer_read, answer_write = os.pipe()
    with tempfile.TemporaryDirectory() as profile:
        process = subprocess.Popen(
            [
                "bash",
                "-c",
                f'exec "$0" "$@" 3<&{command_read} 4>&{answer_write}',
                program,
                *_FLAGS,
                f"--user-data-dir={profile}",
            ],
            pass_fds=(command_read, answer_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(command_read)
        os.close(answer_write)
        try:
            yield Page(process, answer_read, command_write)
        finally:
            os.close(command_write)
            os.close(answer_read)
            process.terminate()
            process.wait(timeout=20)
