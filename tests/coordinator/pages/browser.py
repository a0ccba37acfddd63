"""A real headless Chromium, driven over its DevTools protocol: open a page, look, click, type, take its picture.

- One browser serves many tests; each test has a tab of its own.
- It reaches loopback alone: every other host is refused by the browser, and what was tried is kept.
- What a page writes to its console or throws is kept, too: a sound page says nothing.
"""

import asyncio
import base64
import json
import os
import shutil
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
PATIENCE_S = 60.0

FLAGS = (
    "--headless=new", "--remote-debugging-port=0", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-extensions", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)  # fmt: skip


class Tab:
    """A browser tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, session: str, numbers: "count[int]") -> None:
        self._socket = socket
        self._session = session
        self._numbers = numbers
        self.requests: list[str] = []
        self.complaints: list[str] = []

    async def open(self, url: str, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Load a page, to the end of its scripts."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.call("Emulation.setEmulatedMedia", features=scheme)
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href.startsWith('http')")

    async def back(self, path: str) -> None:
        """Go back to the previous page, which has this path."""
        history = await self.call("Page.getNavigationHistory")
        before = history["entries"][history["currentIndex"] - 1]
        await self.call("Page.navigateToHistoryEntry", entryId=before["id"])
        await self.until(f"document.readyState === 'complete' && location.pathname === {json.dumps(path)}")

    async def look(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are waited for."""
        answer = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until an expression holds; the page itself looks, at every frame."""
        wait = f"new Promise((done) => (function look() {{ ({expression}) ? done() : setTimeout(look, 30); }})())"
        async with asyncio.timeout(PATIENCE_S):
            await self.look(wait)

    async def click(self, selector: str) -> None:
        await self.look(f"document.querySelector({json.dumps(selector)}).click()")

    async def press(self, key: str) -> None:
        """A key that is no letter, as a keyboard sends it."""
        code = {"Tab": 9, "Enter": 13}[key]
        for kind in ("rawKeyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    async def without_scripts(self) -> None:
        await self.call("Emulation.setScriptExecutionDisabled", value=True)

    async def picture(self) -> bytes:
        """Return a screenshot as WebP."""
        answer = await self.call("Page.captureScreenshot", format="webp", quality=70)
        return base64.b64decode(answer["data"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Ask the browser; what it tells meanwhile is noted."""
        number = next(self._numbers)
        asked = {"id": number, "method": method, "params": params, "sessionId": self._session}
        await self._socket.send_json(asked)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                said = await self._socket.receive_json()
                if said.get("id") == number:
                    assert "error" not in said, said["error"]
                    result: dict[str, Any] = said["result"]
                    return result
                self._note(said.get("method", ""), said.get("params", {}))

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"):
            self.complaints.append(json.dumps(params)[:500])


class Browser:
    """A running Chromium."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = count(1)

    @asynccontextmanager
    async def tab(self) -> AsyncIterator[Tab]:
        """A fresh one, with no memory of the others."""
        context = (await self._ask("Target.createBrowserContext"))["browserContextId"]
        target = (await self._ask("Target.createTarget", url="about:blank", browserContextId=context))["targetId"]
        session = (await self._ask("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        tab = Tab(self._socket, session, self._numbers)
        for domain in ("Page", "Network", "Runtime", "Log"):
            await tab.call(f"{domain}.enable")
        try:
            yield tab
        finally:
            await self._ask("Target.disposeBrowserContext", browserContextId=context)

    async def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(PATIENCE_S):
            while (said := await self._socket.receive_json()).get("id") != number:
                pass
        assert "error" not in said, said["error"]
        result: dict[str, Any] = said["result"]
        return result


@asynccontextmanager
async def open_browser() -> AsyncIterator[Browser]:
    """Start Chromium with a folder of its own, and end it."""
    assert CHROMIUM
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        # Chromium's sandbox refuses root, as which tests run in containers; only our own pages are opened.
        flags = [*FLAGS, f"--user-data-dir={folder}", *["--no-sandbox"] * (os.geteuid() == 0)]
        process = await asyncio.create_subprocess_exec(CHROMIUM, *flags, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE)
        try:
            assert process.stderr
            async with asyncio.timeout(PATIENCE_S):
                while b"DevTools listening on " not in (line := await process.stderr.readline()):
                    assert line, "Chromium did not start"
            drain = asyncio.create_task(_drain(process.stderr))
            address = line.decode().rpartition(" ")[2].strip()
            async with aiohttp.ClientSession() as client, client.ws_connect(address, max_msg_size=0) as socket:
                yield Browser(socket)
                await socket.send_json({"id": 0, "method": "Browser.close"})
            await asyncio.wait_for(process.wait(), PATIENCE_S)
            await drain
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def _drain(stream: asyncio.StreamReader) -> None:
    while await stream.readline():
        pass
