"""Drive a headless Chromium over DevTools' pipe, for tests and screenshots: it needs no driver, port or package."""

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 60.0  # for any answer: a loaded machine starts a browser slowly

# The browser takes commands at descriptor 3 and answers at 4, each message ended by a null byte.
_AT_3_AND_4 = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); "
    "os.execvp(sys.argv[3], sys.argv[3:])"
)


def find_browser() -> str | None:
    """Return the path of Chromium, or None if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A page of a headless browser.

    Args:
        commands: The pipe that takes commands.
        answers: The pipe that gives answers and events.

    Attributes:
        requests: The addresses that the page has asked for.
        errors: Uncaught exceptions, and errors in the page's console: what the Content-Security-Policy refused, too.
        dialogs: The texts of dialogs that a script has opened.
    """

    def __init__(self, commands: int, answers: int) -> None:
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.dialogs: list[str] = []
        self._commands, self._answers = commands, answers
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol and return its result; events are kept on the way."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)

    def open(self, address: str, *, width: int = 1280, height: int = 860, dark: bool = False) -> None:
        """Go to an address, in a window of a size in pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.evaluate("window.isOld = true")
        self.call("Page.navigate", url=address)
        self.wait_for("!window.isOld && document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page; that of a promise when it is there."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, f"{expression}: {found['exceptionDetails']}"
        return found["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Wait until an expression is true in the page, and return its value."""
        ends = time.monotonic() + SECONDS
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < ends, f"{expression} is {value!r} still; errors: {self.errors}"
            time.sleep(0.02)
        return value

    def press(self, key: str) -> None:
        """Press a key, as at the keyboard: one character, or a name such as Tab and ArrowRight."""
        text = {"text": key} if len(key) == 1 else {}
        codes = {"Tab": 9, "Escape": 27, " ": 32, "ArrowLeft": 37, "ArrowRight": 39}
        key_code = {"windowsVirtualKeyCode": codes[key]} if key in codes else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text, **key_code)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, **key_code)

    def mouse(self, kind: str, x: float, y: float) -> None:
        """Move the mouse, or press or release its left button: mouseMoved, mousePressed, mouseReleased."""
        held = {"button": "left", "clickCount": 1} if kind != "mouseMoved" else {}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **held)

    def screenshot(self, path: Path) -> None:
        """Write what the window shows as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        """Tell the browser to end, which completes its logs."""
        os.write(self._commands, b'{"id": 0, "method": "Browser.close"}\0')

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._answers, 1 << 20)
            assert part, "the browser has ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(parameters["exceptionDetails"])[:2000])
            case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                self.errors.append(parameters["entry"]["text"])
            case "Page.javascriptDialogOpening":
                self.dialogs.append(parameters["message"])
            case _:
                pass


@contextmanager
def open_browser(folder: Path) -> Generator[Browser]:
    """Start a browser whose profile lies in a folder, and that finds no host but the loopback; end it at the end."""
    path = find_browser()
    if path is None:
        raise FileNotFoundError("no Chromium here: apt-get install chromium")
    flags = [
        "--headless=new",
        "--remote-debugging-pipe",
        f"--user-data-dir={folder / 'profile'}",
        "--no-sandbox",  # containers run as root, which the sandbox refuses
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--hide-scrollbars",
        "--force-color-profile=srgb",
        # Any request that left the machine would go to this proxy, which is not there.
        "--proxy-server=127.0.0.1:9",
        "--proxy-bypass-list=127.0.0.1",
        f"--log-net-log={folder / 'net.json'}",
        "about:blank",
    ]
    command_reader, command_writer = os.pipe()
    answer_reader, answer_writer = os.pipe()
    with (folder / "browser.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", _AT_3_AND_4, str(command_reader), str(answer_writer), path, *flags],
            pass_fds=(command_reader, answer_writer),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    os.close(command_reader)
    os.close(answer_writer)
    try:
        browser = Browser(command_writer, answer_reader)
        yield browser
        browser.close()
        process.wait(SECONDS)
    finally:
        os.close(command_writer)
        os.close(answer_reader)
        if process.poll() is None:
            process.kill()
            process.wait()
