"""The pages in a real Chromium: readable without scripts, alive with them, proof against hostile names, accessible.

They are skipped only where there is no Chromium; what needs npm's checker, also where that cannot be had.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.pages import charts
from coordinator.publishing.signed_metadata import SignedMetadata
from ledger.proof import LedgerReceipt
from protocol.people.names import nickname
from protocol.wire.signing import NodeKey
from tests.coordinator.pages.browser import CHROMIUM, Tab
from tests.coordinator.pages.rounds import HOSTILE, earn, hostile_id
from tests.coordinator.served import Served
from tests.ledger import values
from tests.swarm_node.log_world import NOW, Log

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed"),
]

PAGE_MAX_BYTES = 250_000
EARNER = NodeKey((1).to_bytes(32)).node_id
PAGES = (
    "/",
    "/leaderboard",
    "/leaderboard?view=owners",
    "/leaderboard?view=teams",
    "/leaderboard?view=days",
    "/training",
    f"/nodes/{EARNER}",
    "/entries/0",
    "/join",
    "/usage",
    "/verify.html",
    "/nodes/nobody",
)

WIDER = """[...document.querySelectorAll('body *')]
  .filter((one) => one.getBoundingClientRect().right > innerWidth && !one.closest('.wide'))
  .map((one) => one.outerHTML.slice(0, 80))"""
"""A script that finds what reaches beyond the window outside of the frames."""

TABLES_THAT_SCROLL = """[...document.querySelectorAll('main .wide')]
  .filter((one) => one.scrollWidth > one.clientWidth && one.querySelector('table'))
  .map((one) => [one.getAttribute('aria-label'), one.scrollWidth, one.clientWidth])"""

SHOWS_ITS_SOURCE = """EventSource = class extends EventSource {
  constructor(...all) { super(...all); window.source = this; }
}"""


def url(served: Served, path: str) -> str:
    return str(served.client.make_url(path))


async def test_the_board_is_there_without_scripts(served: Served, tab: Tab) -> None:
    await tab.without_scripts()
    await tab.call("Page.navigate", url=url(served, "/leaderboard"))
    await tab.call("Emulation.setScriptExecutionDisabled", value=False)
    await tab.until("document.querySelectorAll('tbody tr').length")
    assert await tab.look("document.querySelectorAll('tbody tr').length") == 2 + len(HOSTILE)
    assert "Live" not in await tab.look("document.body.innerText")


async def test_no_page_is_large_complains_or_asks_anybody_else(served: Served, tab: Tab) -> None:
    home = url(served, "/")
    for path in PAGES[:-1]:
        tab.requests.clear()
        await tab.open(url(served, path))
        sizes = await tab.look(
            "Promise.all([location.href, ...performance.getEntriesByType('resource').map((one) => one.name)]"
            ".filter((name) => !name.endsWith('/v1/events'))"
            ".map((name) => fetch(name).then((reply) => reply.arrayBuffer()).then((body) => body.byteLength)))"
        )
        assert sum(sizes) <= PAGE_MAX_BYTES, (path, sizes)
        assert all(one.startswith(home) for one in tab.requests), tab.requests
    assert tab.complaints == []


FOREIGN = """document.querySelectorAll('script:not([src^="/static/"]), img:not([src$="/badge.svg"]), b').length"""


async def test_hostile_names_stay_text_and_in_their_place(served: Served, tab: Tab) -> None:
    worst = [f"/nodes/{hostile_id(number)}" for number, kind in enumerate(HOSTILE) if kind in ("markup", "long")]
    for path in ("/", "/leaderboard", "/training", *worst):
        await tab.open(url(served, path), width=360, height=740)
        assert await tab.look("window.pwned") is None
        assert await tab.look(FOREIGN) == 0
        assert await tab.look("document.documentElement.scrollWidth <= innerWidth"), path
        assert await tab.look(r"/[\u202a-\u202e\u2066-\u2069]/.test(document.body.textContent)") is False
    await tab.open(url(served, "/leaderboard"))
    names = await tab.look("Object.fromEntries([...document.querySelectorAll('main bdi')].map((one) => "
                           "[one.parentElement.title, one.textContent]))")  # fmt: skip
    shown = {kind: names[hostile_id(number)] for number, kind in enumerate(HOSTILE)}
    assert shown["markup"].startswith("<script>")
    assert shown["emoji"] == HOSTILE["emoji"]
    assert max(map(len, shown.values())) <= 40
    for number, kind in enumerate(HOSTILE):
        if kind in ("empty", "blank"):
            assert shown[kind] == nickname(hostile_id(number))


@pytest.mark.parametrize("width", [360, 768, 1000, 1280])
async def test_no_page_scrolls_sideways(served: Served, tab: Tab, width: int) -> None:
    """A page does not scroll sideways when opened, nor with everything unfolded; nor do its tables, in their frames."""
    for path in PAGES:
        await tab.open(url(served, path), width=width)
        assert await tab.look(TABLES_THAT_SCROLL) == [], path
        await tab.look("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        widest = await tab.look("document.documentElement.scrollWidth")
        assert widest <= width, (path, widest, await tab.look(WIDER))


BROKEN_HASHES = """[...document.querySelectorAll('td:last-child > code')]
  .filter((one) => one.getClientRects().length > 1)
  .map((one) => one.textContent)"""


async def test_a_hash_stays_on_its_line_on_a_tablet(served: Served, tab: Tab) -> None:
    await tab.open(url(served, "/entries/0"), width=800)
    assert await tab.look("document.querySelectorAll('td:last-child > code').length") > 0
    assert await tab.look(BROKEN_HASHES) == []


CUT_OFF = """[...document.querySelectorAll('.up span')]
  .filter((one) => one.getBoundingClientRect().left < document.querySelector('main').getBoundingClientRect().left
    || one.getBoundingClientRect().right > one.closest('.plot').querySelector('svg').getBoundingClientRect().left)
  .map((one) => one.textContent)"""
"""Labels of an axis that begin outside of the page, or reach into the picture."""


@pytest.mark.parametrize("worst", [-0.000477, -5.12e-06, 0.000_123_4, 1_234_567_890.0, 999.9])
async def test_no_label_of_an_axis_is_cut_off(served: Served, tab: Tab, worst: float) -> None:
    await tab.open(url(served, "/training"), width=390)
    drawn = str(charts.lines("a", "a", "update", {"a": [(0.0, worst), (1.0, worst * 1.01)]}))
    await tab.look(f"document.querySelector('main').innerHTML = {json.dumps(drawn)}")
    assert await tab.look("document.querySelectorAll('.up span').length") >= 2
    assert await tab.look(CUT_OFF) == []


async def test_labels_have_one_size_on_every_screen(served: Served, tab: Tab) -> None:
    for width in (390, 1400):
        await tab.open(url(served, "/"), width=width)
        size = "getComputedStyle(document.querySelector('.large .up span')).fontSize"
        assert await tab.look(size) == "13px"
        assert await tab.look("document.querySelector('.large svg').getBoundingClientRect().width") > 0.7 * min(
            width, 1100
        )


async def test_the_pointer_shows_the_figures_of_a_chart(served: Served, tab: Tab) -> None:
    await tab.open(url(served, "/training"))
    curve = [(float(x), float(x * x)) for x in range(5)]
    drawn = str(charts.lines("a", "a", "update", {"a": curve}))
    await tab.look(f"document.querySelector('main').innerHTML = {json.dumps(drawn)}")
    await tab.look("""(() => {
      const svg = document.querySelector('.plot svg'), box = svg.getBoundingClientRect();
      const at = { clientX: box.left + 0.74 * box.width, clientY: box.top + 9, bubbles: true };
      svg.dispatchEvent(new PointerEvent('pointermove', at));
    })()""")
    assert await tab.look("document.querySelector('.tip').textContent") == "update 3: 9"
    assert tab.complaints == []


async def test_the_browser_proves_a_receipt_by_itself(served: Served, tab: Tab) -> None:
    await tab.open(url(served, f"/nodes/{EARNER}"))
    await tab.click("button[data-claim]")
    await tab.until("document.getElementById('checked').textContent")
    assert (await tab.look("document.getElementById('checked').textContent")).startswith("Proved: claim ")


async def test_forged_receipts_prove_nothing(served: Served, tab: Tab) -> None:
    """Every byte of a receipt counts; so do the round and the claim that it was asked for."""
    await tab.open(url(served, f"/nodes/{EARNER}"))
    found = await tab.look("""(async () => {
      const { check } = await import("/static/receipt.js");
      const claim = document.querySelector("button[data-claim]").dataset.claim;
      const round = document.querySelector("[data-round]").dataset.round;
      const bytes = new Uint8Array(await (await fetch(`/v1/receipts/${claim}`)).arrayBuffer());
      const holds = (data, id, asked) => check(data, id, asked).then(() => true, () => false);
      const forged = [];
      for (let place = 0; place < bytes.length; place += 3) {
        const changed = bytes.slice();
        changed[place] ^= 1 << place % 8;
        if (await holds(changed, round, claim)) forged.push(place);
      }
      return {
        forged,
        honest: await holds(bytes, round, claim),
        cut: await holds(bytes.subarray(0, -1), round, claim),
        other_round: await holds(bytes, "ab".repeat(32), claim),
        other_claim: await holds(bytes, round, "ab".repeat(32)),
      };
    })()""")
    assert found == {"forged": [], "honest": True, "cut": False, "other_round": False, "other_claim": False}


async def test_a_receipt_of_what_an_appeal_gave_back_is_proved(served: Served, tab: Tab, tmp_path: Path) -> None:
    """A settlement of another claim, and a reinstatement of what was not void, are refused."""
    log = Log(SignedMetadata.create(tmp_path / "keys", tmp_path / "metadata", 600.0, NOW))
    log.log_roots()
    log.add([values.deposit(10**9), values.credit(1), values.void(1), values.appeal(1), values.ruling(1)])
    log.add([values.reinstate(1), values.credit(2), values.post(2)])
    honest = LedgerReceipt.from_bytes(await log.file(f"receipts/{values.claim(1)}", 2**20) or b"")
    other = LedgerReceipt.from_bytes(await log.file(f"receipts/{values.claim(2)}", 2**20) or b"")
    credit, void, reinstated = honest.entries
    shown = {
        "whole": (credit, void, reinstated), "void": (credit, void), "not void": (credit, reinstated), "none": (),
        "other": (credit, other.entries[1]), "twice": (credit, void, reinstated, reinstated),
    }  # fmt: skip
    files = {name: list(honest.model_copy(update={"entries": some}).to_bytes()) for name, some in shown.items()}
    await tab.open(url(served, f"/nodes/{EARNER}"))
    found = await tab.look(f"""(async () => {{
      const {{ check }} = await import("/static/receipt.js");
      const said = {{}};
      for (const [name, bytes] of Object.entries({json.dumps(files)}))
        said[name] = await check(Uint8Array.from(bytes), "{log.round_id}", "{values.claim(1)}")
          .then((proved) => proved.state, (error) => error.message);
      return said;
    }})()""")
    refused = dict.fromkeys(("not void", "none", "other", "twice"), "The receipt is not about this claim.")
    assert found == {"whole": "reinstated", "void": "voided"} | refused


async def test_a_newcomer_appears_without_a_reload_and_nothing_else_moves(served: Served, tab: Tab) -> None:
    await tab.open(url(served, "/leaderboard"))
    await tab.until("document.getElementById('live').textContent === 'This page refreshes itself.'")
    await tab.look("window.stays = true; document.querySelector('thead a').focus()")
    focused = await tab.look("document.activeElement.getAttribute('href')")
    key = await served.join(77)
    await tab.until(f"document.querySelector('a[href=\"/nodes/{key.node_id}\"]')")
    assert await tab.look("window.stays") is True
    assert await tab.look("document.activeElement.getAttribute('href')") == focused


async def test_a_page_that_is_left_gives_its_connection_back_and_listens_again_on_the_way_back(
    served: Served, tab: Tab
) -> None:
    """Browsers keep pages that are left, and open six connections to a host at the most."""
    await tab.call("Page.addScriptToEvaluateOnNewDocument", source=SHOWS_ITS_SOURCE)
    await tab.open(url(served, "/leaderboard"))
    await tab.look("addEventListener('pagehide', () => { localStorage.left = source.readyState }); window.kept = true")
    await tab.open(url(served, "/training"))
    await tab.until("Number(localStorage.left) === EventSource.CLOSED")
    await tab.back("/leaderboard")
    assert await tab.look("window.kept"), "it was loaded again, which shows nothing of the way back"
    key = await served.join(78)
    await tab.until(f"document.querySelector('a[href=\"/nodes/{key.node_id}\"]')")


async def test_everything_is_reached_by_keyboard(served: Served, tab: Tab) -> None:
    await tab.open(url(served, "/leaderboard"))
    await tab.press("Tab")
    assert await tab.look("document.activeElement.className") == "skip"
    await tab.press("Enter")
    await tab.until("document.activeElement.id === 'main'")
    for _ in range(40):
        await tab.press("Tab")
        if await tab.look("document.activeElement.textContent") == "credit":
            break
    await tab.press("Enter")
    await tab.until("document.querySelector('th[aria-sort] a')?.textContent === 'credit'")


@pytest.mark.parametrize(("dark", "width"), [(False, 1200), (True, 360)])
async def test_axe_finds_nothing_serious(served: Served, tab: Tab, axe: str, dark: bool, width: int) -> None:
    found: list[Any] = []
    for path in PAGES[::2] if dark else PAGES:
        await tab.open(url(served, path), width=width, height=740, dark=dark)
        await tab.look("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        await tab.look(f"{axe}; 0")
        told = await tab.look("axe.run().then((found) => JSON.stringify(found.violations))")
        found += [(path, one["id"], one["nodes"][0]["html"]) for one in json.loads(told) if one["impact"] != "minor"]
    assert found == []


async def test_figures_grow_while_one_looks(served: Served, tab: Tab) -> None:
    await tab.open(url(served, "/training"))
    before = await tab.look("document.querySelector('#metric-0-table').textContent")
    await earn(served, await served.join(1))
    await tab.until(f"document.querySelector('#metric-0-table').textContent !== {json.dumps(before)}")
