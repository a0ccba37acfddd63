"""A whole ledger checked by `verify.html` in Chromium: entries per second, and how long the page stands still.

- The log is synthetic: credits of 200 nodes, each posted, with a leaderboard that counts all of them. Its files come
  from memory, by HTTP over loopback, to one tab of a headless Chromium with an empty cache.
- The longest pause is the largest time between two ticks of a timer that the page sets to 10 ms.
"""

import asyncio
import json
import tempfile
import time
from pathlib import Path

from aiohttp import web

from bench.harness import Bench, no_options, quick_from_environment
from bench.ledger import NODES, PRICE, TOKENS, Memory
from coordinator.pages import verifying
from ledger.entry import amount
from protocol import ids
from tests.coordinator.pages.browser import CHROMIUM, Browser, open_browser

TICKS = """(() => {
  let before = performance.now();
  window.longest = 0;
  setInterval(() => {
    const now = performance.now();
    window.longest = Math.max(window.longest, now - before);
    before = now;
  }, 10);
})()"""

VERDICT = "document.getElementById('verdict')"


def leaderboard(size: int) -> bytes:
    """The sums of a log of `size` entries: a deposit, then credits and their posts in turn."""
    claims, is_open = divmod(size - 1, 2)
    rows = []
    for node in range(NODES):
        posted = len(range(node, claims, NODES))
        waits = int(is_open and claims % NODES == node)
        rows.append(
            {"node_id": ids.node_id(node.to_bytes(32)), "posted_micros": posted * amount(TOKENS, PRICE),
             "pending_micros": waits * amount(TOKENS, PRICE), "voided_micros": 0, "validated_tokens": posted * TOKENS}
        )  # fmt: skip
    return json.dumps({"ledger_size": size, "nodes": rows}).encode()


def application(files: Memory, board: bytes) -> web.Application:
    async def page(_request: web.Request) -> web.Response:
        headers = {"Content-Security-Policy": verifying.policy()}
        return web.Response(text=verifying.render(), content_type="text/html", headers=headers)

    async def file(request: web.Request) -> web.Response:
        path = request.match_info["path"]
        body = board if path == "leaderboard" else await files.file(path, 0)
        return web.Response(body=body or b"", status=200 if body else 404)

    app = web.Application()
    app.router.add_get("/verify.html", page)
    app.router.add_get("/v1/{path:.*}", file)
    return app


async def check(browser: Browser, where: str, size: int) -> tuple[float, float]:
    """Return the seconds of one check, and the longest pause of the page in milliseconds."""
    async with browser.tab() as tab:
        await tab.open(f"{where}/verify.html")
        await tab.look(TICKS)
        started = time.perf_counter()
        await tab.click("#check")
        while not await tab.look(f"{VERDICT}.className"):  # noqa: ASYNC110  # the page is another process
            await asyncio.sleep(0.2)
        seconds = time.perf_counter() - started
        assert await tab.look(f"{VERDICT}.textContent") == f"Proved: {size:,} entries."
        return seconds, float(await tab.look("window.longest"))


async def measure(bench: Bench, folder: Path, size: int, rounds: int) -> None:
    runner = web.AppRunner(application(Memory(folder, size), leaderboard(size)))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    where = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with open_browser() as browser:
        for _ in range(rounds):
            seconds, pause_ms = await check(browser, where, size)
            bench.measure("a whole ledger", seconds, unit="s")
            bench.measure("entries", size / seconds, unit="entries/s")
            bench.measure("longest pause", pause_ms, unit="ms")
    await runner.cleanup()
    bench.goal(f"{size:,} entries checked in 60 s", bench.median("a whole ledger"), at_most=60.0)
    bench.goal("the page never stands still for a second", bench.median("longest pause"), at_most=1000.0)


def main() -> int:
    """Measure, print and judge."""
    no_options(__doc__)
    if CHROMIUM is None:
        raise SystemExit("This bench needs Chromium.")
    quick = quick_from_environment()
    size, rounds = (5_000, 1) if quick else (100_000, 3)
    bench = Bench("verify_page", inputs={"entries": size, "rounds": rounds, "nodes": NODES}, quick=quick)
    with tempfile.TemporaryDirectory() as name:
        asyncio.run(measure(bench, Path(name), size, rounds))
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
