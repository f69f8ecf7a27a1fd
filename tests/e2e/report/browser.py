"""Drive Chromium over its DevTools protocol through two pipes, without a port or a package."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # containers have no user namespaces
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
WITH_PIPES = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for end, number in zip(ends, (3, 4)):
    os.dup2(end, number)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Give the pipes the file descriptors 3 and 4, which the browser expects."""
LEFT_BUTTON = {"button": "left", "buttons": 1, "clickCount": 1}


class Browser:
    """Send commands and wait for answers; events that arrive meanwhile are kept."""

    def __init__(self, process: subprocess.Popen[bytes], commands: int, answers: int) -> None:
        self._process, self._commands, self._answers = process, commands, os.fdopen(answers, "rb")
        self._rest, self._number = b"", 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": session} if session else {}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def wait_for(self, event: str, session: str) -> None:
        while not any(one["method"] == event and one.get("sessionId") == session for one in self.events):
            self.events.append(self._read())

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._answers.fileno(), 1 << 20)
            if not part:
                raise RuntimeError(f"the browser ended with {self._process.wait()}")
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def open(self, file: Path, **options: Any) -> "Tab":
        return Tab(self, file, **options)


class Tab:
    """A page at a given width, light or dark."""

    def __init__(
        self, browser: Browser, file: Path, *, width: int = 1440, dark: bool = False, scripts: bool = True
    ) -> None:
        self.browser = browser
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self.target = target
        self.session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "DOM"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        if not scripts:
            self.call("Emulation.setScriptExecutionDisabled", value=True)
        browser.events.clear()
        self.call("Page.navigate", url=file.resolve().as_uri())
        browser.wait_for("Page.loadEventFired", self.session)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **params)

    def run(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        options = {"returnByValue": True, "awaitPromise": True, "userGesture": True}
        answer = self.call("Runtime.evaluate", expression=expression, **options)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']['exception']['description']}")
        return answer["result"].get("value")

    def console_messages(self) -> list[str]:
        """Return console lines, errors, and violations of the content security policy."""
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        self.run("0")  # receive pending events
        return [json.dumps(one["params"]) for one in self.browser.events if one["method"] in kinds]

    def mouse(self, kind: str, x: float, y: float, **options: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **options)

    def click(self, x: float, y: float) -> None:
        self.mouse("mouseMoved", x, y)
        self.mouse("mousePressed", x, y, **LEFT_BUTTON)
        self.mouse("mouseReleased", x, y, button="left", clickCount=1)

    def touch(self, x: float, y: float) -> None:
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def press(self, key: str) -> None:
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=key if len(key) == 1 else "")
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def middle_of(self, selector: str) -> tuple[float, float]:
        """Scroll an element into view and return its center."""
        x, y = self.run(
            f"(() => {{ const one = document.querySelector({json.dumps(selector)});"
            "one.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const box = one.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2] })()"
        )
        return x, y

    def close(self) -> None:
        self.browser.call("Target.closeTarget", targetId=self.target)


@contextmanager
def started(profile: Path) -> Iterator[Browser]:
    """Start a browser with its own profile; raise if none is installed."""
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None:
        raise RuntimeError(
            f"no browser: none of {', '.join(NAMES)} is on PATH; install chromium, or leave -m browser out"
        )
    read_commands, commands = os.pipe()
    answers, write_answers = os.pipe()
    words = [sys.executable, "-c", WITH_PIPES, str(read_commands), str(write_answers), program, *FLAGS]
    with (profile / "browser.log").open("wb") as log:
        process = subprocess.Popen(
            [*words, f"--user-data-dir={profile}"], pass_fds=(read_commands, write_answers), stdout=log, stderr=log
        )
    os.close(read_commands)
    os.close(write_answers)
    browser = Browser(process, commands, answers)
    try:
        yield browser
        browser.call("Browser.close")
    finally:
        process.terminate()
        process.wait()
        os.close(commands)
