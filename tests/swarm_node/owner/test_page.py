"""The owner's page: what it shows, what its forms do without a script, and that both are what the commands do."""

import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from swarm_node.allowance import settings
from swarm_node.allowance.settings import CardLimits, Limits
from swarm_node.commands.agent import find_tunnel, may_start_browser
from swarm_node.ledger.receipts import RECEIPTS, kept_among
from swarm_node.owner.control_socket import ask
from swarm_node.owner.page.document import PageFigures, document
from swarm_node.owner.page.limits_form import AT_NEXT_START, NODE_FIELDS, changed_fields, limits_form
from tests.swarm_node.owner.page_world import CLAIM, HOSTILE, card
from tests.swarm_node.owner.test_page_access import opened
from tests.swarm_node.owner.test_status_lines import rates, row, told


def text_of(page: str) -> str:
    """Return the text of a page as it is read."""
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", page)).split())


def shown(**changes: Any) -> str:
    """Return the page of a snapshot with these values."""
    own = {name: changes.pop(name) for name in list(changes) if name in PageFigures.__dataclass_fields__}
    state = told(**{"answers": [], "today_micros": None, "cards": [card(0)]} | changes)
    figures: dict[str, Any] = {"state": state, "limits": Limits()} | own
    return document(PageFigures(**figures), "/p/")


def inputs_of(form: str) -> dict[str, str]:
    """Return what a browser sends for an untouched form."""
    sent = {}
    for tag in re.findall(r"<input [^>]*>", form):
        values = dict(re.findall(r'([\w-]+)="([^"]*)"', tag))
        if values["type"] == "checkbox" and " checked" not in tag:
            continue
        sent[values["name"]] = unescape(values.get("value", "on"))
    return sent


def test_each_of_several_rounds_is_on_the_page() -> None:
    markup = shown(rounds=[row(1, distrust="<script>"), row(2), row(3, error="Banned.", ended=True)])
    page = text_of(markup)
    assert "http://1.test: waiting: <script>; 2 accepted" in page
    assert "<script>;" not in markup
    assert "http://3.test: left: Banned." in page
    assert "those of the round at http://coordinator.test:8700" in page
    assert "The figures on this page" not in text_of(shown()), "with one round there is nothing to tell apart"


def test_everything_that_is_promised_is_on_the_page() -> None:
    page = text_of(shown(today_micros=7_300_000, lines=["12:00 registered"], cards=[card(0), card(1, celsius=None)]))
    for promised in (
        "generating",
        "1,234 tokens/s, llama",
        "per hour 1.10",
        "per day 24.00 in the last 24 hours",
        "today 7.30 since midnight, reported 0 s ago",
        "this run 0.06",
        "pending 0.40",
        "payable 1.20",
        "Earnings in EUR",
        "Card 0: RTX 4090",
        "temperature 61 °C power 300 W speed 1,234 tokens/s memory 8.0 of 24.0 GB",
        "temperature –",
        "12 rollouts accepted, 2 rejected (stale_version)",
        "12:00 registered",
        "7 (latest 8)",
        "12.50 EUR paid to the owner in 3 payouts",
    ):
        assert promised in page, promised


def test_what_is_not_known_is_not_a_zero() -> None:
    page = text_of(shown(rates=None, earnings_ms=None, pending_micros=None, payable_micros=None, cards=[]))
    for words in ("per hour –", "per day –", "today –", "pending –", "payable –", "temperature –", "power –"):
        assert words in page, words
    assert "The rate is not known yet" in page


def test_answers_of_different_credit_are_not_shown_alike() -> None:
    answer = {"at_ms": 0, "lease_id": "ab" * 16, "claim_id": "", "outcome": "accepted", "code": "", "message": ""}
    answers = [answer | {"tokens": tokens, "credit_micros": tokens} for tokens in (96, 128)]
    page = text_of(shown(answers=answers, unit={"name": "EUR", "decimals": 4}))
    assert "96 0.000096 " in page
    assert "128 0.000128 " in page


def test_a_day_that_is_not_over_is_said_to_be_an_estimate_and_minutes_are_no_basis_for_one() -> None:
    early = rates(rate={"hour_micros": 500_000, "day_micros": 500_000, "earning_s": 1800.0})
    page = text_of(shown(rates=early))
    assert "per hour 1.00 from 30 min 0 s" in page
    assert "per day – known after an hour of earning" in page
    later = rates(rate={"hour_micros": 1_000_000, "day_micros": 1_500_000, "earning_s": 5400.0})
    assert "per day 24.00 at the rate of the last 1 h 30 min" in text_of(shown(rates=later))


def test_texts_of_others_are_text() -> None:
    answer = {"at_ms": 0, "lease_id": HOSTILE, "claim_id": "", "outcome": "rejected", "code": HOSTILE}
    page = shown(
        name=HOSTILE,
        coordinator=HOSTILE,
        trouble=HOSTILE,
        error=HOSTILE,
        engine=HOSTILE,
        cards=[card(0, name=HOSTILE, reason=HOSTILE)],
        answers=[answer | {"message": HOSTILE, "tokens": 0, "credit_micros": 0}],
    )
    assert re.findall(r"<script[^>]*>", page) == ['<script type="module" src="/p/page.js">']
    assert "<img" not in page
    assert "\u202e" not in page


def test_a_card_that_this_node_does_not_use_has_no_buttons() -> None:
    work = ("state", "reason", "tokens_per_s", "groups")
    unused = {name: value for name, value in card(1).items() if name not in work}
    page = shown(cards=[card(0), unused])
    assert "not used by this node" in page
    assert "Limits of card 0" in page
    assert "Limits of card 1" not in page
    assert page.count('value="snooze"') == 2, "the node's and that of card 0"


def test_an_answer_links_to_its_receipt_once_it_is_kept(tmp_path: Path) -> None:
    answer = {"at_ms": 0, "lease_id": "ab" * 16, "claim_id": CLAIM, "outcome": "accepted", "code": "", "message": ""}
    rows = [answer | {"tokens": 5, "credit_micros": 1}]
    assert "not yet" in shown(answers=rows)
    assert "receipts/" not in shown(answers=rows).partition("<table")[2].partition("</table>")[0]
    assert f'href="/p/receipts/{CLAIM}"' in shown(answers=rows, kept_receipts=frozenset({CLAIM}))
    for number in range(4):
        (tmp_path / f"{number:06}.receipts").write_bytes(CLAIM.encode() if number == 2 else b"")
    assert kept_among(tmp_path, [CLAIM, "c2" * 32]) == {CLAIM}
    assert kept_among(tmp_path / RECEIPTS, [CLAIM]) == set()


LIMITS = (
    Limits(),
    Limits(celsius=83.5, power_watts=1234.0, vram_share=0.33, turns_mib=1000, upload_gb=0.25, on_battery=True),
    Limits(best_paid_first=True),
    Limits(hours="22:00-07:00", zone="Europe/Berlin", idle_minutes=1440.0, threads=4096, price_floor=900_000),
)


def test_the_order_of_rounds_is_explained_in_whole_sentences() -> None:
    (field,) = (field for field in NODE_FIELDS if field.name == "best_paid_first")
    assert field.about.endswith("Otherwise it works first for the first round that you gave to join.")


@pytest.mark.parametrize("limits", LIMITS)
def test_a_form_that_nobody_touched_changes_nothing(limits: Limits) -> None:
    assert changed_fields(inputs_of(limits_form("/p/limits", limits))) == {}


@pytest.mark.parametrize("limits", LIMITS)
def test_each_limit_can_be_typed_and_is_checked_as_on_the_command_line(limits: Limits, tmp_path: Path) -> None:
    sent = inputs_of(limits_form("/p/limits", limits))
    typed = {"celsius": "80", "power_watts": "250", "hours": "21:00-06:00", "zone": "UTC", "idle_minutes": "7"}
    typed |= {"upload_gb": "50", "price_floor": "5", "vram_share": "0.5", "turns_mib": "64", "threads": "3"}
    assert {field.name for field in NODE_FIELDS} == {*typed, "on_battery", "best_paid_first"}
    assert changed_fields(inputs_of(limits_form("/p/limits", Limits())) | {"best_paid_first": "true"}) == {
        "best_paid_first": True
    }
    assert {field.name for field in NODE_FIELDS} == Limits.model_fields.keys() - {"cards"}
    for name, value in typed.items():
        (changed,) = changed_fields(sent | {name: value}).items()
        assert changed[0] == name
        after = settings.changed(tmp_path, dict([changed]))
        assert str(getattr(after, name)).removesuffix(".0") == value
    assert typed.keys() > AT_NEXT_START


def test_a_slider_counts_where_no_script_moves_its_number() -> None:
    sent = inputs_of(limits_form("/p/limits", LIMITS[1]))
    assert changed_fields(sent | {"celsius.slider": "70"}) == {"celsius": 70.0}
    assert changed_fields(sent | {"celsius.slider": "70", "celsius": "71"}) == {"celsius": 71.0}
    assert changed_fields(sent | {"vram_share.slider": "0.3"}) == {"vram_share": 0.3}
    assert changed_fields(sent | {"celsius": ""}) == {"celsius": 0.0}, "an empty number is the default"
    without = {name: value for name, value in sent.items() if name != "on_battery"}
    assert changed_fields(without) == {"on_battery": False}


def test_the_limits_of_a_card_are_those_that_a_card_has() -> None:
    sent = inputs_of(limits_form("/p/limits", CardLimits(celsius=75.0), card=1))
    assert sent["card"] == "1"
    assert {name.partition(".")[0] for name in sent} == {"card", *CardLimits.model_fields}
    assert changed_fields(sent | {"power_watts": "200", "upload_gb": "1"}, card=1) == {"power_watts": 200.0}


@pytest.mark.trio
async def test_buttons_are_orders_of_the_control_socket(tmp_path: Path) -> None:
    async with opened(tmp_path) as (governor, browser):
        for form, expected in (
            ({"do": "pause", "minutes": "60"}, "paused by you; `swarm-node resume` continues"),
            ({"do": "resume", "minutes": "60"}, ""),
            ({"do": "snooze", "minutes": "60"}, "paused by you until "),
            ({"do": "resume", "minutes": ""}, ""),
            ({"do": "finish"}, "finishing"),
        ):
            reply = await browser.post("orders", form)
            assert (reply.status_code, reply.headers["location"]) == (303, f"/{browser.secret_path()}/")
            reason = (await ask(tmp_path, "status"))["resting"]
            assert reason.startswith(expected)
            assert bool(expected) == bool(reason)
        assert "Finishing: the agent stops" in text_of((await browser.get()).text)
        assert "Finishing: the agent stops" not in (await browser.get()).text, "a result is shown once"
        await browser.post("orders", {"do": "pause", "card": "1", "minutes": "60"})
        assert "Paused card 1." not in (await browser.get(sec_fetch_mode="cors")).text, "the script shows no result"
        assert "Paused card 1." in (await browser.get(sec_fetch_mode="navigate")).text
        assert "Paused card 1." not in (await browser.get()).text, "it is shown once"
        assert [decision.may_work for decision in governor.card_decisions.values()] == [True, False, True]
        left = await browser.post("orders", {"do": "leave"})
        assert (left.status_code, "swarm-node join" in left.text) == (200, True)
        assert governor.leaving.is_set()


@pytest.mark.trio
@pytest.mark.parametrize(
    ("form", "error"),
    [
        ({"do": "pause", "card": "7"}, "This node uses no card 7. It uses these cards: 0, 1, 2."),
        ({"do": "snooze", "minutes": "-5"}, "The order has an option that it does not know, or an invalid one."),
        ({"do": "snooze", "minutes": "nan"}, "The order has an option that it does not know, or an invalid one."),
        ({"do": "snooze"}, "The minutes are missing. Say for how long, or use Pause."),
        ({"do": "finish", "card": "1"}, "The order has an option that it does not know, or an invalid one."),
        ({"do": "__class__"}, "is not a valid order. Valid orders: status, pause, resume, finish, leave, move."),
        ({}, "is not a valid order."),
        ({"do": "pause", "card": "x"}, "A card and minutes are numbers."),
    ],
)
async def test_a_refused_order_is_shown_with_the_next_step(tmp_path: Path, form: dict[str, str], error: str) -> None:
    async with opened(tmp_path) as (governor, browser):
        reply = await browser.post("orders", form)
        assert 400 <= reply.status_code < 500
        assert error in text_of(reply.text).replace(" .", ".")
        assert governor.decision.may_work
        assert all(decision.may_work for decision in governor.card_decisions.values())


@pytest.mark.trio
async def test_limits_are_saved_where_the_command_saves_them(tmp_path: Path) -> None:
    async with opened(tmp_path, given={"upload_gb": 5.0}) as (_, browser):
        page = (await browser.get()).text
        assert "The agent was started with 5, which counts until it ends." in page
        settings.write(tmp_path, Limits(idle_minutes=9.0))  # by the command, while the form is open
        sent = {"celsius.was": "0", "celsius": "83", "idle_minutes.was": "0", "idle_minutes": "0"}
        saved = await browser.post("limits", sent)
        assert saved.status_code == 303
        assert settings.read(tmp_path) == Limits(idle_minutes=9.0, celsius=83.0)
        page = (await browser.get()).text
        assert "Saved 1 limit: celsius. The agent applies changes within seconds." in page
        assert 'value="83"' in page
        slid = {"power_watts.was": "0", "power_watts.slider": "250", "power_watts": "0"}
        await browser.post("limits", slid | {"card": "1"})
        assert settings.read(tmp_path).cards == {"1": CardLimits(power_watts=250.0)}
        await browser.post("limits", {"celsius.was": "83", "celsius": "83"})
        assert "Nothing was changed." in (await browser.get()).text


@pytest.mark.trio
@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("hours", "25:00-26:00", "hours = '25:00-26:00': write the hours as 22:00-07:00."),
        ("zone", "Atlantis", "zone = 'Atlantis': write the time zone as Europe/Berlin."),
        ("celsius", "hot", "celsius = 'hot': this is not a number."),
        ("celsius", "999", "celsius = 999.0: the highest value is 150."),
        ("threads", "1.5", "threads = '1.5': this is not a whole number."),
        ("power_watts", "nan", "power_watts = nan: "),
    ],
)
async def test_a_refused_limit_is_shown_with_the_text_of_the_command(
    tmp_path: Path, name: str, value: str, error: str
) -> None:
    async with opened(tmp_path) as (_, browser):
        reply = await browser.post("limits", {f"{name}.was": "0", name: value})
        assert 400 <= reply.status_code < 500
        assert error in text_of(reply.text)
        assert not (tmp_path / settings.FILE).exists()


@pytest.mark.trio
async def test_an_invalid_file_of_limits_hides_no_page(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, browser):
        (tmp_path / settings.FILE).write_text("celsius = {")
        assert (await browser.get()).status_code == 200
        reply = await browser.post("limits", {"celsius.was": "0", "celsius": "83"})
        assert "Fix the file, or remove it." in reply.text


@pytest.mark.trio
async def test_the_page_has_the_same_figures_as_the_command(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, browser):
        reply = await browser.get("status.json")
        own, command = reply.json(), await ask(tmp_path, "status")
        moments = ("now_ms", "started_ms", "earnings_ms", "rates", "answers", "last_verdict")
        assert reply.headers["content-type"] == "application/json"
        assert own.keys() == command.keys()
        assert [name for name in own if own[name] != command[name] and name not in moments] == []


@pytest.mark.trio
@pytest.mark.parametrize("claim", [CLAIM, "..", "../" * 22, "%2e%2e%2fx", "c1" * 31 + "%0a", "C" * 65, ""])
async def test_a_receipt_that_is_not_kept_names_the_next_step(tmp_path: Path, claim: str) -> None:
    async with opened(tmp_path) as (_, browser):
        reply = await browser.raw("GET", f"/{browser.secret_path()}/receipts/{claim}")
        assert reply.status_code in (403, 404)
        assert "ledger receipts" in reply.text or "swarm-node open" in reply.text


@pytest.mark.trio
async def test_a_kept_receipt_is_a_file_to_save(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, browser):
        folder = tmp_path / "round" / RECEIPTS
        folder.mkdir(parents=True)
        (folder / f"{CLAIM}.receipt").write_bytes(b"proof")
        reply = await browser.get(f"receipts/{CLAIM}")
        assert (reply.status_code, reply.content) == (200, b"proof")
        assert reply.headers["content-disposition"] == f'attachment; filename="{CLAIM}.receipt"'


@pytest.mark.parametrize(
    ("connection", "command"),
    [
        ("", ""),
        ("garbage", ""),
        ("198.51.100.7 50000 203.0.113.5 22", "ssh -N -L 4711:127.0.0.1:4711 anna@203.0.113.5"),
        ("2001:db8::7 50000 2001:db8::5 2222", "ssh -N -L 4711:127.0.0.1:4711 -p 2222 anna@2001:db8::5"),
    ],
)
def test_over_ssh_the_command_for_the_own_computer_is_printed(connection: str, command: str) -> None:
    assert find_tunnel({"SSH_CONNECTION": connection}, 4711, "anna") == command


@pytest.mark.parametrize(
    ("environment", "platform", "is_root", "expected"),
    [
        ({"DISPLAY": ":0"}, "linux", False, True),
        ({}, "darwin", False, True),
        ({}, "linux", False, False),
        ({"DISPLAY": ":0"}, "linux", True, False),
        ({}, "darwin", True, False),
    ],
)
def test_a_browser_is_started_on_a_desktop_only_and_never_as_root(
    environment: dict[str, str], platform: str, is_root: bool, expected: bool
) -> None:
    assert may_start_browser(environment, platform, is_root=is_root) is expected
