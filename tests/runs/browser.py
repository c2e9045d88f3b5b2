"""A headless Chromium, driven by its DevTools protocol."""

import asyncio
import itertools
import json
import re
import shutil
import subprocess
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


class Page:
    """Browser tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse):
        self.socket, self.numbers = socket, itertools.count(1)
        self.asked: list[str] = []
        """Addresses that the page asked for."""
        self.said: list[str] = []
        """Errors of its scripts and of its policy."""

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self.numbers)
        await self.socket.send_json({"id": number, "method": method, "params": parameters})
        async for message in self.socket:
            payload = json.loads(message.data)
            if payload.get("id") == number:
                assert "error" not in payload, payload
                return payload["result"]
            if payload.get("method") == "Network.requestWillBeSent":
                self.asked.append(payload["params"]["request"]["url"])
            if payload.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.said.append(json.dumps(payload["params"]))
        raise AssertionError("the browser went away")

    async def run(self, code: str) -> Any:
        """The value of a JavaScript expression."""
        actual = await self.call("Runtime.evaluate", expression=code, returnByValue=True)
        assert "exceptionDetails" not in actual, actual
        return actual["result"].get("value")

    async def open(self, path: Path) -> None:
        """Load a file and wait until its script is done."""
        await self.call("Page.navigate", url=path.as_uri())
        for _ in range(300):
            if await self.run("document.documentElement?.dataset.ready !== undefined"):
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"never ready: {self.said}")

    async def drag(self, x: float, y: float, to: float) -> None:
        """Press, move right, let go."""
        steps = [("mouseMoved", x), ("mousePressed", x), ("mouseMoved", to), ("mouseReleased", to)]
        for kind, position in steps:
            await self.call(
                "Input.dispatchMouseEvent", type=kind, x=position, y=y, button="left", clickCount=1
            )


@asynccontextmanager
async def open_browser(width: int = 1200, height: int = 900):
    """A tab without a network."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "about:blank"]
        command += [f"--user-data-dir={folder}", "--remote-debugging-port=0", "--mute-audio"]
        command += ["--proxy-server=127.0.0.1:1", f"--window-size={width},{height}"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            for line in process.stderr:
                if actual := re.search(r"ws://([^/]+)/", line):
                    break
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://{actual[1]}/json/list") as answer:
                    tabs = await answer.json()
                tab = next(entry for entry in tabs if entry["type"] == "page")
                address = tab["webSocketDebuggerUrl"]
                async with session.ws_connect(address, max_msg_size=2**27) as socket:
                    page = Page(socket)
                    for domain in ("Page", "Runtime", "Network", "Log"):
                        await page.call(f"{domain}.enable")
                    yield page
        finally:
            process.terminate()
            process.wait()
