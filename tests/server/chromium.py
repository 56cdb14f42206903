"""Headless Chromium over its DevTools pipe: what a page shows, asks for and complains about.

A pipe needs no websocket, so no package; nothing waits for a fixed time.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PATIENCE = 60.0  # seconds; a slow machine passes, a page that hangs does not
PROGRAM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
NO_CHROMIUM = "needs headless Chromium (Debian: apt-get install chromium)"
# Chromium reads commands from descriptor 3 and answers on 4; only the child may move them there.
START = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); "
START += "os.execvp(sys.argv[3], sys.argv[3:])"
FLAGS = (
    "--headless",
    "--no-sandbox",  # there is none for root, and the page is ours
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--remote-debugging-pipe",
    "--window-size=1200,800",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
KEYS = {
    "Tab": 9,
    "Enter": 13,
    "Escape": 27,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
}
ALT = 1


class Browser:
    """A running Chromium. Messages are read only while an answer is awaited."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands = commands
        self._answers = answers
        self._unread = b""
        self._last_id = 0
        self.events: list[dict[str, Any]] = []

    def ask(self, method: str, session: str | None = None, **params: Any) -> Any:
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._last_id:
            self.events.append(answer)
        if "error" in answer:
            raise AssertionError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE
        while b"\0" not in self._unread:
            if not select.select([self._answers], [], [], until - time.monotonic())[0]:
                raise AssertionError(f"Chromium was silent for {PATIENCE:.0f} s")
            read = os.read(self._answers, 1 << 16)
            assert read, "Chromium ended"
            self._unread += read
        message, _, self._unread = self._unread.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    @contextmanager
    def page(self, url: str, dark: bool = False) -> Iterator[Page]:
        """A tab of its own, with storage and cookies of its own."""
        context = self.ask("Target.createBrowserContext")["browserContextId"]
        target = self.ask("Target.createTarget", url="about:blank", browserContextId=context)
        attached = self.ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        page = Page(self, attached["sessionId"])
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.ask(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.ask("Emulation.setEmulatedMedia", features=[scheme])
        page.open(url)
        try:
            yield page
        finally:
            self.ask("Target.disposeBrowserContext", browserContextId=context)


class Page:
    """One tab, driven as a person would: keys, a pointer, and looking."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def ask(self, method: str, **params: Any) -> Any:
        return self._browser.ask(method, self._session, **params)

    def open(self, url: str) -> None:
        self.ask("Page.navigate", url=url)
        self.until("location.href !== 'about:blank' && document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """The value of JavaScript, awaited if it is a promise."""
        answer = self.ask(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise AssertionError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait for JavaScript to be true."""
        end = time.monotonic() + PATIENCE
        while not self.evaluate(condition):
            if time.monotonic() > end:
                raise AssertionError(f"never true: {condition}\n{self.evaluate(SEEN)}")
            self.evaluate("new Promise((done) => setTimeout(done, 10))")

    def text(self, selector: str) -> str:
        found: str = self.evaluate(f"document.querySelector({selector!r}).textContent")
        return found

    def type(self, text: str) -> None:
        self.ask("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        about = {
            "key": key,
            "code": key,
            "windowsVirtualKeyCode": KEYS[key],
            "modifiers": modifiers,
        }
        text = {"text": "\r"} if key == "Enter" else {}
        self.ask(
            "Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **about, **text
        )
        self.ask("Input.dispatchKeyEvent", type="keyUp", **about)

    def point_at(self, selector: str) -> tuple[float, float]:
        """Move the pointer to the middle of the first such element."""
        x, y = self.evaluate(
            f"(({{left, top, width, height}}) => [left + width / 2, top + height / 2])"
            f"(document.querySelector({selector!r}).getClientRects()[0])"
        )
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        return x, y

    def click(self, selector: str) -> None:
        x, y = self.point_at(selector)
        button = {"x": x, "y": y, "button": "left", "clickCount": 1}
        self.ask("Input.dispatchMouseEvent", type="mousePressed", **button)
        self.ask("Input.dispatchMouseEvent", type="mouseReleased", **button)

    def seen(self, method: str) -> list[dict[str, Any]]:
        """What this tab's events of that name said, up to now."""
        self.evaluate("0")
        return [
            event["params"]
            for event in self._browser.events
            if event.get("method") == method and event.get("sessionId") == self._session
        ]

    def asked_urls(self) -> list[str]:
        return [event["request"]["url"] for event in self.seen("Network.requestWillBeSent")]

    def complaints(self) -> list[str]:
        """Errors and warnings in the console, of scripts, the network and the security policy."""
        spoken = [
            str(event["args"])
            for event in self.seen("Runtime.consoleAPICalled")
            if event["type"] in ("error", "warning", "assert")
        ]
        thrown = [str(event["exceptionDetails"]) for event in self.seen("Runtime.exceptionThrown")]
        logged = [
            f"{event['entry']['text']} {event['entry'].get('url', '')}"
            for event in self.seen("Log.entryAdded")
            if event["entry"]["level"] in ("error", "warning")
        ]
        return spoken + thrown + logged

    def screenshot(self, path: Path) -> None:
        import base64

        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot")["data"]))


SEEN = "document.body.innerText + document.querySelector('#code')?.value"


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """A Chromium that ends with the block."""
    assert PROGRAM is not None
    commands_out, commands = os.pipe()
    answers, answers_in = os.pipe()
    theirs = (commands_out, answers_in)
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            START,
            *map(str, theirs),
            PROGRAM,
            *FLAGS,
            f"--user-data-dir={profile}",
        ],
        pass_fds=theirs,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for descriptor in theirs:
        os.close(descriptor)
    try:
        browser = Browser(commands, answers)
        yield browser
        browser.ask("Browser.close")
    finally:
        os.close(commands)
        os.close(answers)
        if child.poll() is None:
            try:
                child.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                child.kill()
