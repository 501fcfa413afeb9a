"""A headless Chromium with a page that a test can click and read, by the DevTools protocol over two pipes."""

import base64
import json
import os
import select
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.debian import environment
from tests.deadline import DEADLINE_S
from tests.debian import fetched

PROGRAM = "usr/lib/chromium/chromium"
FLAGS = [
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--no-first-run", "--disable-extensions", "--disable-background-networking", "--disable-sync"),
    *("--disable-component-update", "--no-proxy-server", "--window-size=1280,1000"),
]


class Browser:
    """A browser with one page. Use as a context manager.

    `problems` are errors of the page's scripts, and of files that the page loads.
    """

    def __init__(self, profile: Path) -> None:
        self._profile = profile
        self._program = fetched("chromium", PROGRAM)
        self._buffer = b""
        self._last_id = 0
        self.problems: list[str] = []

    def __enter__(self) -> "Browser":
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        script = f'exec "$@" 3<&{to_read} 4>&{to_write}'
        self._process = subprocess.Popen(
            [
                *("bash", "-c", script, "chromium", str(self._program), *FLAGS),
                *(f"--user-data-dir={self._profile}", "--remote-debugging-pipe", "about:blank"),
            ],
            pass_fds=(to_read, to_write),
            env={**environment("chromium"), "HOME": str(self._profile)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(DEADLINE_S)
        os.close(self._to)
        os.close(self._from)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command, and return its result."""
        self._last_id += 1
        command: dict[str, Any] = {"id": self._last_id, "method": method, "params": parameters}
        if self._session is not None:
            command["sessionId"] = self._session
        os.write(self._to, json.dumps(command).encode() + b"\0")
        while True:
            message = self._receive()
            if message.get("id") == self._last_id:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            if message.get("method") == "Runtime.exceptionThrown":
                self.problems.append(str(message["params"]["exceptionDetails"]))
            if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.problems.append(str(message["params"]["entry"]))

    def _receive(self) -> dict[str, Any]:
        end_s = time.monotonic() + DEADLINE_S
        while b"\0" not in self._buffer:
            readable, _, _ = select.select([self._from], [], [], max(0.0, end_s - time.monotonic()))
            assert readable, "Chromium does not answer"
            received = os.read(self._from, 1 << 16)
            assert received, "Chromium has ended"
            self._buffer += received
        message, _, self._buffer = self._buffer.partition(b"\0")
        decoded: dict[str, Any] = json.loads(message)
        return decoded

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        """Return the text of the first element that matches; empty if none matches."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def click(self, selector: str) -> None:
        """Click the middle of the first element that matches."""
        x, y = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
            " return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Type into the element that has the focus."""
        self.call("Input.insertText", text=text)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until `condition` is true. `what` describes it in the error message."""
        end_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < end_s, f"the page does not show {what}"
            time.sleep(0.05)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
