"""The page of the usage of API keys, in a real Chromium: what it shows to holders and the operator, and forgets."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from coordinator.base.clock import now_ms
from coordinator.transactions import api_keys
from coordinator.transactions.api_keys import KeyUsage
from protocol.limits import DAY_MS
from protocol.text.money import CREDITS, Unit
from tests.coordinator.pages.browser import CHROMIUM, Tab
from tests.coordinator.pages.test_browser import TABLES_THAT_SCROLL, url
from tests.coordinator.served import Served, serve

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed"),
]

MARKUP = "<b>nobody</b>"
NAMES = ("evaluations", MARKUP, "W" * api_keys.NAME_MAX_CHARS)


class Keys:
    """A round with one used key, one that expires, and a revoked one with the longest name."""

    def __init__(self, served: Served, secrets: list[str]) -> None:
        self.served = served
        self.used, self.unused, self.revoked = secrets
        self.operator = served.round.operator_token


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def keys(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Keys]:
    async with serve(tmp_path_factory.mktemp("round")) as served:
        run, moment_ms = served.round.database.run, now_ms()
        secrets = []
        for place, name in enumerate(NAMES):
            expires_ms = moment_ms + 86_400_000 if place == 1 else None
            secrets.append(await run(api_keys.make, name, 5_000_000, expires_ms=expires_ms, now_ms=moment_ms))
        await run(api_keys.reserve, 1, 600_000, CREDITS, now_ms=moment_ms - 150_000)
        await run(_charge, moment_ms)
        await run(api_keys.revoke, NAMES[2], now_ms=moment_ms)
        yield Keys(served, secrets)


def _charge(connection: Any, moment_ms: int) -> None:
    """Charge the first key for many answers of today, and for one of two days ago."""
    many, one = KeyUsage(1207, 90_210, 401_113, 400_000), KeyUsage(1, 40, 1000, 10_000)
    api_keys.charge(connection, 1, many, reserved_micros=500_000, answered_ms=moment_ms)
    api_keys.charge(connection, 1, one, answered_ms=moment_ms - 2 * DAY_MS)


async def show(tab: Tab, secret: str) -> None:
    """Paste a secret, press the button, and wait for the answer."""
    await tab.look(f"document.getElementById('secret').value = {json.dumps(secret)}")
    await tab.click("#show")
    await tab.until("!document.querySelector('#show:disabled, #show[aria-disabled]')")


async def figures(tab: Tab) -> dict[str, str]:
    """Return the named figures that the page shows."""
    found: dict[str, str] = await tab.look("""Object.fromEntries([...document.querySelectorAll('#figures div')].map(
      (one) => [one.firstChild.textContent, one.lastChild.textContent.replaceAll('\\u202f', ' ')]))""")
    return found


async def test_a_holder_sees_the_usage_of_the_own_key_and_of_no_other(keys: Keys, tab: Tab) -> None:
    await tab.open(url(keys.served, "/usage"))
    await show(tab, f" {keys.used}\n")
    assert await tab.look("document.getElementById('whose').textContent") == "evaluations"
    assert await figures(tab) == {
        "spent": "0.41 credits", "left": "4.49 credits", "budget": "5.00 credits",
        "held for open queries": "0.10 credits", "answered queries": "1 208", "open queries": "0",
        "sampled tokens": "402 113", "last use": "2 min ago",
    }  # fmt: skip
    assert "nobody" not in await tab.look("document.body.textContent")
    assert tab.complaints == []


async def test_the_operator_sees_all_keys_and_their_sum(keys: Keys, tab: Tab) -> None:
    await tab.open(url(keys.served, "/usage"), width=1280)
    await show(tab, keys.operator)
    shown = await figures(tab)
    assert (shown["keys"], shown["spent"], shown["sampled tokens"]) == ("3", "0.41 credits", "402 113")
    rows = await tab.look("""[...document.querySelectorAll('tbody tr')].map((row) =>
      [...row.children].map((cell) => cell.textContent.replaceAll('\\u202f', ' ')))""")
    assert rows[0] == ["evaluations", "0.4100", "4.4900", "5.0000", "1 208", "0", "402 113", "2 min ago"]
    assert rows[1][0].startswith(f"{MARKUP} valid until 20")
    assert rows[1][-1] == "never"
    assert rows[2][0].startswith(f"{NAMES[2]} revoked 20")
    assert await tab.look("document.querySelectorAll('tbody b').length") == 0
    assert tab.complaints == []


async def test_the_days_of_a_key_or_of_all_are_in_a_table_and_as_bars(keys: Keys, tab: Tab) -> None:
    for secret in (keys.used, keys.operator):
        await tab.open(url(keys.served, "/usage"), width=1280)
        await show(tab, secret)
        rows = await tab.look("""[...document.querySelectorAll('#days tbody tr')].map((row) =>
          [...row.children].map((cell) => cell.textContent.replaceAll('\\u202f', ' ')))""")
        assert [row[1:] for row in rows] == [["1 207", "90 210", "401 113", "0.4000"], ["1", "40", "1 000", "0.0100"]]
        bars = await tab.look("""[...document.querySelectorAll('#days figure')].map((chart) =>
          [...chart.querySelectorAll('rect')].map((bar) => [Number(bar.getAttribute('height')), bar.textContent]))""")
        assert [len(chart) for chart in bars] == [30, 30]
        assert [[round(height, 1) for height, _ in chart if height] for chart in bars] == [[0.2, 100], [2.5, 100]]
        assert [chart[27][1].replace("\u202f", " ") for chart in bars] == [
            f"{rows[1][0]}: 1 000",
            f"{rows[1][0]}: 0.0100",
        ]
        assert tab.complaints == []
    await show(tab, keys.unused)
    assert await tab.look("document.getElementById('days').textContent") == "The last 30 daysNo query was answered."


async def test_a_wrong_key_or_token_is_named_and_shows_nothing(keys: Keys, tab: Tab) -> None:
    await tab.open(url(keys.served, "/usage"))
    await show(tab, keys.operator)
    for secret, said in (
        ("es-unknown", "This API key is not known in this round."),
        (keys.revoked, "was revoked."),
        ("0" * 64, "This is neither an API key of this round nor the operator's token."),
        ("ключ", "This is neither an API key of this round nor the operator's token."),
        ("es-ключ", "This is neither an API key of this round nor the operator's token."),
    ):
        await show(tab, secret)
        assert said in await tab.look("document.getElementById('mistake').textContent")
        assert await tab.look("document.getElementById('usage').hidden"), "figures of the last one are hidden"
        assert await tab.look("document.querySelectorAll('tbody tr, #figures div, #days *').length") == 0


async def test_a_secret_is_in_no_storage_or_address_and_is_gone_when_the_page_is_left(keys: Keys, tab: Tab) -> None:
    await tab.open(url(keys.served, "/usage"))
    await tab.look("window.kept = true")
    tab.requests.clear()
    await show(tab, keys.operator)
    assert [asked for asked in tab.requests if "/v1/" in asked] == [url(keys.served, "/v1/operator/keys")]
    kept = "JSON.stringify([{ ...localStorage }, { ...sessionStorage }, document.cookie, location.href, history.state])"
    assert keys.operator not in await tab.look(kept)
    await tab.open(url(keys.served, "/join"))
    await tab.back("/usage")
    assert await tab.look("window.kept"), "it was loaded again, which shows nothing of the way back"
    assert await tab.look("document.getElementById('secret').value") == ""
    assert await tab.look("document.querySelectorAll('tbody tr, #figures div, #days *').length") == 0


async def test_a_secret_of_another_service_is_not_sent(keys: Keys, tab: Tab) -> None:
    await tab.open(url(keys.served, "/usage"))
    tab.requests.clear()
    for secret in ("sk-" + "0" * 61, "0" * 63, "0" * 65, "F" * 64):
        await show(tab, secret)
        assert "This is neither" in await tab.look("document.getElementById('mistake').textContent")
    assert [asked for asked in tab.requests if "/v1/" in asked] == []


async def test_the_button_keeps_the_focus_and_the_answer_is_announced(keys: Keys, tab: Tab) -> None:
    await tab.open(url(keys.served, "/usage"))
    await tab.look("document.getElementById('show').focus()")
    assert await tab.look("!document.getElementById('said').closest('[hidden]')"), "it is there before its text"
    await show(tab, keys.used)
    assert await tab.look("document.activeElement.id") == "show"
    assert (await tab.look("document.getElementById('said').textContent")).startswith("As of ")
    await show(tab, "es-unknown")
    assert await tab.look("document.getElementById('said').textContent") == ""


async def test_times_are_by_the_coordinators_clock(keys: Keys, tab: Tab) -> None:
    """The clock of the visitor is decades late."""
    await tab.open(url(keys.served, "/usage"))
    await tab.look("const real = Date; Date = class extends real { static now() { return 0; } constructor(...of) "
                   "{ super(...(of.length ? of : [0])); } }; 0")  # fmt: skip
    await show(tab, keys.used)
    assert (await figures(tab))["last use"] == "2 min ago"
    assert await tab.look("document.getElementById('said').textContent") != "As of 00:00:00 UTC."


async def test_a_reply_that_comes_when_the_page_was_left_shows_nothing(keys: Keys, tab: Tab) -> None:
    """The page is kept for the way back, and its script may go on there."""
    await tab.open(url(keys.served, "/usage"))
    await tab.look(f"document.getElementById('secret').value = {json.dumps(keys.operator)}")
    await tab.look("document.getElementById('form').requestSubmit(); dispatchEvent(new Event('pagehide'))")
    await tab.until("!document.querySelector('#show:disabled, #show[aria-disabled]')")
    assert await tab.look("document.getElementById('usage').hidden")
    assert await tab.look("document.querySelectorAll('tbody tr, #figures div, #days *').length") == 0
    assert await tab.look("document.getElementById('mistake').textContent") == ""


@pytest.mark.parametrize("width", [360, 768, 1280])
async def test_figures_fit_every_screen_and_axe_finds_nothing_serious(
    keys: Keys, tab: Tab, axe: str, width: int
) -> None:
    for secret in (keys.operator, keys.used, "es-unknown"):
        await tab.open(url(keys.served, "/usage"), width=width, dark=width == 360)
        await show(tab, secret)
        assert await tab.look("document.documentElement.scrollWidth <= innerWidth")
        assert await tab.look(TABLES_THAT_SCROLL) == []
        await tab.look(f"{axe}; 0")
        told = await tab.look("axe.run().then((found) => JSON.stringify(found.violations))")
        assert [one["id"] for one in json.loads(told) if one["impact"] != "minor"] == []


async def test_amounts_are_those_of_every_other_page(keys: Keys, tab: Tab) -> None:
    amounts = [0, 1, 4, 5, 49, 50, 51, 99, 100, 12_345, 999_950, 10**6, -410_000, -3, 1_234_567_890_123]
    asked = [(micros, decimals) for micros in amounts for decimals in (0, 2, 4, 6)]
    await tab.open(url(keys.served, "/usage"))
    found = await tab.look(f"""import('/static/usage.js').then(({{ figure }}) =>
      {json.dumps(asked)}.map(([micros, decimals]) => figure(micros, decimals)))""")
    assert found == [Unit("EUR", decimals).figure(micros, separator="\u202f") for micros, decimals in asked]
    found = await tab.look(f"""import('/static/usage.js').then(({{ amount }}) =>
      {json.dumps(asked)}.map(([micros, decimals]) => amount(micros, {{ decimals, name: "EUR" }})))""")
    assert found == [Unit("EUR", decimals).amount(micros, separator="\u202f") for micros, decimals in asked]
