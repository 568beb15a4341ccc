"""A headless Chromium driven over its DevTools pipe with the standard library: real clicks and keys, and its console."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import tempfile
import time
from base64 import b64decode
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
KEYS = {
    "Tab": 9,
    "Enter": 13,
    " ": 32,
    "End": 35,
    "Home": 36,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
}
PATIENCE = 60.0  # seconds: other tests share the machine


def found() -> str | None:
    """The path of a Chromium, or None; CHROMIUM names another."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One process and one tab of it."""

    def __init__(self, path: str) -> None:
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.read, theirs_out = os.pipe()
        theirs_in, self.write = os.pipe()
        quiet = os.open(os.devnull, os.O_RDWR)
        given = [
            fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 100) for fd in (quiet, quiet, theirs_in, theirs_out)
        ]  # clear of 1 to 4
        flags = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
            "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe",
            f"--user-data-dir={self.folder.name}", "about:blank",
        ]  # fmt: skip
        moved = [(os.POSIX_SPAWN_DUP2, fd, to) for to, fd in enumerate(given, 1)]
        self.pid = os.posix_spawn(path, [path, *flags], dict(os.environ), file_actions=moved)
        for fd in (quiet, theirs_in, theirs_out, *given):
            os.close(fd)
        self.number, self.held, self.events = 0, b"", []
        self.session = None
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        """End the process."""
        session, self.session = self.session, None
        self.call("Browser.close", patience=20.0)
        del session
        os.waitpid(self.pid, 0)
        os.close(self.read)
        os.close(self.write)
        self.folder.cleanup()

    def call(self, method: str, *, patience: float = PATIENCE, **params: object) -> dict:
        """Send a command and wait for its answer; events that come before it are kept."""
        self.number += 1
        sent = {"id": self.number, "method": method, "params": params}
        os.write(self.write, json.dumps(sent | ({"sessionId": self.session} if self.session else {})).encode() + b"\0")
        end = time.monotonic() + patience
        while (message := self.message(end)).get("id") != self.number:
            if "method" in message:
                self.events.append(message)
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']}")
        return message["result"]

    def message(self, end: float) -> dict:
        """The next message."""
        while b"\0" not in self.held:
            ready, _, _ = select.select([self.read], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError("the browser does not answer")
            self.held += os.read(self.read, 1 << 20)
        raw, self.held = self.held.split(b"\0", 1)
        return json.loads(raw)

    def open(self, url: str, width: int = 1400, *, dark: bool = False, media: str = "", height: int = 900) -> None:
        """Load a page in a window of a size, in light or dark, on the screen or as printed."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self.call("Page.navigate", url="about:blank")
        self.events.clear()
        self.call("Page.navigate", url=url)
        self.wait(
            f"location.href.startsWith({json.dumps(url.partition('#')[0])}) && document.readyState === 'complete'"
        )

    def run(self, script: str) -> object:
        """The value of an expression in the page."""
        asked = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in asked:
            raise RuntimeError(asked["exceptionDetails"].get("exception", {}).get("description", script))
        return asked["result"].get("value")

    def wait(self, script: str) -> object:
        """Wait until an expression is true; its value."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if value := self.run(script):
                return value
            time.sleep(0.01)
        raise TimeoutError(f"never true: {script}")

    def text(self, selector: str) -> str:
        """What an element shows."""
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def click(self, selector: str) -> None:
        """Press the mouse in the middle of an element."""
        x, y = self.middle(selector)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def hover(self, selector: str, right: float, down: float) -> None:
        """Move the mouse to a spot of an element: shares of its width and height."""
        left, top, width, height = self.box(selector)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=left + right * width, y=top + down * height)

    def middle(self, selector: str) -> tuple[float, float]:
        left, top, width, height = self.box(selector)
        return left + width / 2, top + height / 2

    def box(self, selector: str) -> list[float]:
        """Left, top, width, height of an element, brought into view and painted there: a click goes to what is painted.

        It is where it stays: in the same place two frames later, up to 100 times.
        """
        script = (
            f"(async () => {{ const e = document.querySelector({json.dumps(selector)}); let last = '';"
            "for (let i = 0; i < 100; i++) { e.scrollIntoView({block: 'center'});"
            "await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));"
            "const b = e.getBoundingClientRect(), now = [b.x, b.y, b.width, b.height];"
            "if (String(now) === last) return now; last = String(now); } return last.split(',').map(Number); })()"
        )
        return self.run(script)

    def key(self, name: str, times: int = 1) -> None:
        """Press a key."""
        code = KEYS.get(name)
        text = {"Enter": "\r", " ": " "}.get(name, "" if code else name)
        for _ in range(times):
            for kind in ("keyDown", "keyUp"):
                shown = {"text": text} if text and kind == "keyDown" else {}
                self.call(
                    "Input.dispatchKeyEvent",
                    type=kind,
                    key=name,
                    windowsVirtualKeyCode=code or ord(name.upper()),
                    **shown,
                )

    def type(self, selector: str, text: str) -> None:
        """Put the cursor into a field, choose all that is in it, and type."""
        self.click(selector)
        self.run(f"document.querySelector({json.dumps(selector)}).select()")
        self.call("Input.insertText", text=text)

    def said(self) -> list[str]:
        """Errors and warnings of the console, and requests to anything but the page's own server or file."""
        self.run("1")
        lines = []
        for event in self.events:
            kind, told = event["method"], event["params"]
            if kind == "Runtime.exceptionThrown":
                lines.append(told["exceptionDetails"].get("exception", {}).get("description", "an exception"))
            elif kind == "Runtime.consoleAPICalled" and told["type"] in {"error", "warning", "assert"}:
                lines.append(str([arg.get("value") for arg in told["args"]]))
            elif kind == "Log.entryAdded" and told["entry"]["level"] in {"error", "warning"}:
                lines.append(told["entry"]["text"])
            elif kind == "Network.requestWillBeSent":
                url = told["request"]["url"]
                if not url.startswith(("file:", "data:", "blob:", "about:", "http://127.0.0.1:")):
                    lines.append(f"asks {url}")
        return lines

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """Write a screenshot."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(b64decode(shot["data"]))

    def printed(self, path: Path) -> None:
        """Write the page as a PDF on A4, with Chromium's own margins."""
        made = self.call("Page.printToPDF", paperWidth=8.27, paperHeight=11.69, printBackground=True)
        path.write_bytes(b64decode(made["data"]))
