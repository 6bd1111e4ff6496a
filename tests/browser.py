"""A real browser for tests: Chromium without a window, spoken to over a pipe in its
DevTools protocol. No packages.
"""

from __future__ import annotations

import base64
import fcntl
import functools
import http.server
import json
import os
import select
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

_NAMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
)
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--disable-default-apps", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
_TIMEOUT_S = 60.0


def find() -> str | None:
    """Where a Chromium is; GDN_CHROMIUM names another one."""
    named = os.environ.get("GDN_CHROMIUM")
    return named or next(
        (path for name in _NAMES if (path := shutil.which(name))), None
    )


class Browser:
    """One browser process with one page. A context manager: the process and its profile
    are removed at the end.
    """

    def __init__(self) -> None:
        self.profile = tempfile.mkdtemp(prefix="gdn-browser-")
        # we write into the first, and read from the second
        ours = [os.pipe(), os.pipe()]
        # above the numbers 3 and 4, which are the browser's
        theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (ours[0][0], ours[1][1])]

        def place() -> None:
            os.dup2(theirs[0], 3)
            os.dup2(theirs[1], 4)

        self.process = subprocess.Popen(
            [find(), *_FLAGS, f"--user-data-dir={self.profile}", "about:blank"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            preexec_fn=place, pass_fds=(3, 4), start_new_session=True,
        )  # fmt: skip
        for fd in (*theirs, ours[0][0], ours[1][1]):
            os.close(fd)
        self._in, self._out = ours[0][1], ours[1][0]
        self._read, self._last = b"", 0
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None
        pages = self("Target.getTargets")["targetInfos"]
        target = next(t["targetId"] for t in pages if t["type"] == "page")
        self._session = self("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")
        self("Network.setCacheDisabled", cacheDisabled=True)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._in)
        os.close(self._out)
        shutil.rmtree(self.profile, ignore_errors=True)

    def __call__(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its answer; the events until then are kept."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._in, json.dumps(message).encode() + b"\0")
        while True:
            seen = self._next()
            if seen.get("id") == self._last:
                if "error" in seen:
                    raise RuntimeError(f"{method}: {seen['error']}")
                return seen["result"]
            self.events.append(seen)

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + _TIMEOUT_S
        while b"\0" not in self._read:
            if not select.select(
                [self._out], [], [], max(0.0, until - time.monotonic())
            )[0]:
                raise TimeoutError("the browser does not answer")
            chunk = os.read(self._out, 1 << 20)
            if not chunk:
                raise RuntimeError("the browser ended")
            self._read += chunk
        message, _, self._read = self._read.partition(b"\0")
        return json.loads(message)

    def wait(self, event: str) -> None:
        """Until an event has come since the last `open`."""
        while not any(e.get("method") == event for e in self.events):
            self.events.append(self._next())

    # --- what tests use ---

    def open(
        self, url: str, width: int, height: int = 844, *, phone: bool = False
    ) -> None:
        """Load a page in a window of this size, in CSS pixels."""
        self.size(width, height, phone=phone)
        self("Emulation.setEmulatedMedia", media="")
        self.events.clear()
        self("Page.navigate", url=url)
        self.wait("Page.loadEventFired")

    def size(self, width: int, height: int = 844, *, phone: bool = False) -> None:
        self(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=2 if phone else 1, mobile=phone,
        )  # fmt: skip

    def js(self, expression: str) -> Any:
        """The value of an expression in the page."""
        done = self(
            "Runtime.evaluate",
            expression=expression,
            returnByValue=True,
            awaitPromise=True,
        )
        if "exceptionDetails" in done:
            raise RuntimeError(done["exceptionDetails"])
        return done["result"].get("value")

    @property
    def requests(self) -> list[str]:
        """The page's requests since `open`."""
        return [
            e["params"]["request"]["url"]
            for e in self.events
            if e.get("method") == "Network.requestWillBeSent"
        ]

    @property
    def complaints(self) -> list[str]:
        """What went to the console, and exceptions."""
        kinds = (
            "Log.entryAdded",
            "Runtime.consoleAPICalled",
            "Runtime.exceptionThrown",
        )
        return [
            json.dumps(e["params"]) for e in self.events if e.get("method") in kinds
        ]

    def pdf(self) -> bytes:
        """The page as it is printed on A4."""
        data = self(
            "Page.printToPDF",
            paperWidth=8.27,
            paperHeight=11.69,
            preferCSSPageSize=False,
        )["data"]
        return base64.b64decode(data)


class Server:
    """A folder on localhost. `asked` has the paths that were asked for."""

    def __init__(self, folder: Path) -> None:
        self.asked: list[str] = []
        asked = self.asked

        class Handler(http.server.SimpleHTTPRequestHandler):
            def log_request(self, *_: Any) -> None:
                asked.append(self.path)

            def log_message(self, *_: Any) -> None:
                pass

        handler = functools.partial(Handler, directory=str(folder))
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._server.server_close()
