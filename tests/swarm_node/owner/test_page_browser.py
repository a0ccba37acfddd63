"""The owner's page in a real Chromium: forms without scripts, figures that refresh, other ports, accessibility.

It is skipped where there is no Chromium; the accessibility checker also where npm's registry cannot be reached.
"""

import asyncio
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio
import trio
from aiohttp import web

from swarm_node.allowance import settings
from swarm_node.allowance.settings import CardLimits
from swarm_node.base.clock import now_ms
from swarm_node.owner import control_socket
from swarm_node.owner.control_socket import FOLDER
from swarm_node.owner.page.access import FILE, PageKey
from tests.coordinator.pages.browser import CHROMIUM, Tab
from tests.coordinator.pages.test_browser import TABLES_THAT_SCROLL, WIDER
from tests.swarm_node.owner import page_world
from tests.tidy.repository import ROOT

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed"),
]

START = f"""
import sys, trio
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from {page_world.__name__} import main
trio.run(main, Path(sys.argv[2]))
"""

SCRIPT_MAX_BYTES = 5000
PATIENCE_S = 60.0
FRESH = "document.getElementById('fresh').textContent.startsWith('Updated')"


class Served(NamedTuple):
    """A page in another process."""

    home: Path
    key: PageKey

    async def open(self, tab: Tab, **look: Any) -> None:
        """Open the page as `swarm-node open` does."""
        await tab.open(f"{self.key.address}?token={self.key.make_token(now_ms())}", **look)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    home = tmp_path_factory.mktemp("home")
    command = [sys.executable, "-P", "-c", START, str(ROOT), str(home)]
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
    assert process.stdout
    assert process.stdin
    assert await process.stdout.readline()
    said = json.loads((home / FOLDER / FILE).read_bytes())
    yield Served(home, PageKey(said["address"], said["key"]))
    process.stdin.close()
    await process.wait()


async def test_the_address_bar_keeps_no_token_and_the_page_asks_nobody_else(served: Served, tab: Tab) -> None:
    await served.open(tab)
    await tab.until(FRESH)
    assert await tab.look("location.href") == served.key.address
    assert await tab.look("document.cookie") == "", "no script reads the cookie"
    assert all(url.startswith(served.key.address) for url in tab.requests), tab.requests
    assert tab.complaints == []
    assert await tab.look("window.pwned") is None
    assert await tab.look("document.querySelectorAll('script, img').length") == 1
    script = await tab.look("fetch(document.scripts[0].src).then((reply) => reply.text())")
    assert len(script) < SCRIPT_MAX_BYTES


async def ask(home: Path, do: str, **options: float) -> dict[str, Any]:
    """Give an order as the commands do, which run on trio."""
    return await asyncio.to_thread(trio.run, partial(control_socket.ask, home, do, **options))


async def settled(tab: Tab, expression: str) -> None:
    """Wait until an expression holds, also if the page is left for the next one meanwhile."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await tab.until(expression)
                return
            except AssertionError:  # the page of the question is gone
                continue


GONE = "document.querySelectorAll('.notice').forEach((notice) => notice.remove());"
"""Removes the result of the last change."""


async def send(tab: Tab, form: str, button: str, said: str, **typed: str) -> None:
    """Fill in a form, press its button, and wait for the result."""
    fields = "".join(f"form.elements[{json.dumps(name)}].value = {json.dumps(value)};" for name, value in typed.items())
    await tab.look(f"(() => {{ const form = document.querySelector({json.dumps(form)}).form; {fields} {GONE} "
                   f"form.querySelector({json.dumps(button)}).click(); }})()")  # fmt: skip
    await settled(tab, f"document.querySelector('.notice')?.textContent.includes({json.dumps(said)})")


async def test_without_its_script_the_page_is_read_and_every_form_works(served: Served, tab: Tab) -> None:
    await tab.call("Network.setBlockedURLs", urls=["*/page.js"])
    await served.open(tab)
    assert "Shows the moment at which it was loaded." in await tab.look("document.body.innerText")
    card = "form[action$=orders] input[name=card][value='1']"
    await send(tab, card, "button[value=pause]", "Paused card 1.")
    await send(tab, card, "button[value=snooze]", "Paused card 1 for 30 min.", minutes="30")
    await send(tab, card, "button[value=resume]", "Resumed card 1.")
    await send(tab, "#node-celsius", "button.main", "Saved 1 limit: celsius.", celsius="83.5")
    assert settings.read(served.home).celsius == 83.5
    await send(tab, "#card-2-celsius", "button.main", "Saved 1 limit: celsius.", **{"celsius.slider": "70"})
    assert settings.read(served.home).cards == {"2": CardLimits(celsius=70.0)}
    await send(tab, "#node-hours", "button.main", "write the hours as 22:00-07:00", hours="late")
    await send(tab, "#node-celsius", "button.main", "Saved 1 limit: celsius.", celsius="")
    assert settings.read(served.home).celsius == 0.0


async def test_figures_refresh_while_what_is_typed_and_scrolled_stays(served: Served, tab: Tab) -> None:
    await served.open(tab)
    await tab.until(FRESH)
    await tab.look("window.stays = true; document.querySelector('#node-hours').value = '21:00';"
                   "document.querySelector('.log').scrollTop = 7; document.querySelector('.log').focus()")  # fmt: skip
    await ask(served.home, "pause", card=0)
    await tab.until("document.querySelector('#card-0').textContent.includes('paused by you')")
    await ask(served.home, "resume")
    assert await tab.look("window.stays && document.querySelector('#node-hours').value") == "21:00"
    assert await tab.look("[document.activeElement.className, document.activeElement.scrollTop]") == ["log", 7]
    await tab.look("""(() => {
      const slider = document.querySelector("#limits [name='celsius.slider']");
      slider.value = 77;
      slider.dispatchEvent(new Event("input"));
    })()""")
    assert await tab.look("document.querySelector('#node-celsius').value") == "77"
    assert tab.complaints == []


ATTACK = """(async () => {
  const page = PAGE, tried = {};
  const note = (name, act) => act.then((reply) => reply.text()).then((text) => { tried[name] = text.slice(0, 200); },
                                                                    () => { tried[name] = "refused"; });
  await note("read", fetch(page + "status.json", { credentials: "include" }));
  await note("opaque", fetch(page, { credentials: "include", mode: "no-cors" }));
  await note("order", fetch(page + "orders", { method: "POST", credentials: "include", mode: "no-cors",
    headers: { "Content-Type": "application/x-www-form-urlencoded" }, body: "do=leave" }));
  const script = document.createElement("script");
  script.src = page + "status.json";
  await new Promise((done) => { script.onload = () => done(tried.script = "loaded"); script.onerror = () =>
    done(tried.script = "refused"); document.body.append(script); });
  const frame = document.createElement("iframe");
  frame.src = page;
  await new Promise((done) => { frame.onload = done; document.body.append(frame); });
  try { tried.frame = frame.contentDocument?.body.textContent ?? "refused"; } catch { tried.frame = "refused"; }
  return tried;
})()"""


async def test_a_page_of_another_port_reads_and_changes_nothing_even_if_it_knows_the_address(
    served: Served, tab: Tab
) -> None:
    """Browsers count all ports of 127.0.0.1 as one site, and send it one set of cookies."""
    sent: list[str] = []

    async def other(request: web.Request) -> web.Response:
        sent.append(request.headers.get("Cookie", ""))
        return web.Response(text="<!doctype html><title>other</title><body>", content_type="text/html")

    app = web.Application()
    app.router.add_get("/{path:.*}", other)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        port = runner.addresses[0][1]
        await served.open(tab)
        await tab.open(f"http://127.0.0.1:{port}/")
        assert set(sent) == {""}, "the cookie is bound to the page's secret path"
        tried = await tab.look(ATTACK.replace("PAGE", json.dumps(served.key.address)))
        assert tried == {"read": "refused", "opaque": "refused", "order": "refused", "script": "refused",
                         "frame": "refused"}  # fmt: skip
        await tab.look(f"""(() => {{ const form = document.createElement("form"); form.method = "post";
          form.action = {json.dumps(served.key.address + "orders")}; form.innerHTML = "<input name=do value=leave>";
          document.body.append(form); form.submit(); }})()""")
        await settled(tab, "document.body.innerText.includes('Another page has sent you here')")
        assert (await ask(served.home, "status"))["resting"] == ""
        await tab.click("a.button")
        await settled(tab, "document.body.innerText.includes('Graphics cards')")
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(("dark", "width"), [(False, 1200), (True, 1200), (False, 390), (True, 390)])
async def test_axe_finds_nothing_and_nothing_scrolls_sideways(
    served: Served, tab: Tab, axe: str, dark: bool, width: int
) -> None:
    await served.open(tab, width=width, height=740, dark=dark)
    await tab.look("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert await tab.look("document.documentElement.scrollWidth") <= width, await tab.look(WIDER)
    assert await tab.look(TABLES_THAT_SCROLL) == []
    await tab.look(f"{axe}; 0")
    told = json.loads(await tab.look("axe.run().then((found) => JSON.stringify(found.violations))"))
    assert [(one["id"], one["nodes"][0]["html"]) for one in told] == []
