"""Words of a coordinator on the terminal of a node's owner: words, and nothing that steers it."""

import json

import pytest

from protocol.people.owner import Earnings, NodeEarnings
from protocol.text.money import CREDITS, EarningPace, Unit
from protocol.wire.signing import NodeKey
from protocol.work.appeal import AppealReply
from protocol.work.auditing import Explanation
from swarm_node.commands import appeal, keys
from swarm_node.commands.why import lines
from swarm_node.coordinator_api.client import Coordinator
from swarm_node.ledger.notices import OwnerRates
from tests.swarm_node.web import lacks, web

STEERING = "\x1b]52;c;cm0gLXJm\x07\x1b[2J\r[link=http://x]you\x9b2J\u202e"
NODE = NodeKey(bytes(32)).node_id


def test_an_explanation_does_not_steer_the_terminal() -> None:
    finding = {"rule": STEERING, "outcome": "hard", "expected": STEERING, "observed": STEERING, "positions": []}
    said = Explanation(
        lease_id="0" * 32, claim_id=STEERING, state=STEERING, code=STEERING, said=STEERING, finding="hard",
        appeal="denied", ruling=STEERING, report=json.dumps({"findings": [finding]}).encode(), lease=b"", rollout=b"",
    )  # fmt: skip
    told = "".join(lines(said))
    assert told.isprintable()
    assert "\\x1b]52" in told


@pytest.mark.trio
async def test_a_status_that_cannot_be_read_does_not_hide_the_earnings() -> None:
    with web(lacks) as server:
        coordinator = Coordinator(server.url, "0" * 64, NodeKey(bytes(32)))
        assert not await keys.is_finished(coordinator)
        await coordinator.close()
    assert server.asked["/v1/status"]


def earned() -> Earnings:
    """Names are other people's, and addresses the coordinator's word."""
    amounts = {"pending_micros": 1, "payable_micros": 2, "paying_micros": 3, "paid_micros": 4}
    row = NodeEarnings(node_id=NODE, name=STEERING, revoked=False, **amounts)
    return Earnings(
        owner=NODE, nodes=(row,), total=row, address=STEERING, next_address=STEERING, next_from_ms=1_800_000_000_000
    )


def test_earnings_do_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    keys.show_earnings(earned(), None, CREDITS)
    told = capsys.readouterr().out
    assert "\x1b" not in told
    assert "[link=" in told, "no markup either"


def test_what_is_told_to_scripts_does_not_steer_a_terminal_either(capsys: pytest.CaptureFixture[str]) -> None:
    keys.show_earnings(earned(), None, CREDITS, as_json=True)
    reply = AppealReply(outcome="recorded", number=1, claim_id="0" * 64, standing="denied", ruling=STEERING)
    appeal.show(reply, as_json=True)
    first, second = capsys.readouterr().out.splitlines()
    assert (first + second).isascii()
    assert (first + second).isprintable()
    assert (json.loads(first)["address"], json.loads(second)["ruling"]) == (STEERING, STEERING)


def test_earnings_are_shown_in_the_rounds_unit_with_rate_and_payouts(capsys: pytest.CaptureFixture[str]) -> None:
    pace = EarningPace(1_100_000, 24_000_000, 86_400.0)
    rates = OwnerRates({NODE: pace}, pace, 12_500_000, 0, 3, 1, None, 2_000_000)
    keys.show_earnings(earned(), rates, Unit("EUR", 2))
    said = capsys.readouterr().out
    assert "EUR" in said
    assert "micro" not in said
    assert "rate: 1.10 EUR per hour, 24.00 EUR in the last day; the last hour is 10% above" in said
    assert "12.50 EUR paid to the owner in 3 payouts, the last " in said
    assert "next payout: not scheduled (minimum balance 2.00 EUR)" in said
    keys.show_earnings(earned(), rates, Unit("EUR", 2), as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told["unit"] == {"name": "EUR", "decimals": 2}
    assert told["rates"]["rate"] == {"hour_micros": 1_100_000, "day_micros": 24_000_000, "earning_s": 86_400.0}
    assert told["rates"]["nodes"][NODE]["hour_micros"] == 1_100_000


def test_no_amount_is_cut_off_however_narrow_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")  # what a terminal of 60 columns tells its programs
    pace = EarningPace(1_234_567_000_000, 24_000_000_000_000, 86_400.0)
    rates = OwnerRates({NODE: pace}, pace, 0, 0, 0, None, None, 0)
    keys.show_earnings(earned(), rates, Unit("EUR", 2))
    _, header, row, *_ = capsys.readouterr().out.splitlines()
    assert header.split() == ["node", "pending", "payable", "being", "paid", "paid", "last", "hour", "last", "day"]
    assert row.split()[-5:] == ["0.000002", "0.000003", "0.000004", "1,234,567.00", "24,000,000.00"]
    assert len(header) == len(row), "the columns are aligned"


def test_one_node_has_no_total_and_a_finished_round_has_no_rate(capsys: pytest.CaptureFixture[str]) -> None:
    pace = EarningPace(1_100_000, 24_000_000, 420.0)
    rates = OwnerRates({NODE: pace}, pace, 0, 0, 0, None, None, 2_000_000)
    keys.show_earnings(earned(), rates, Unit("EUR", 2), finished=True)
    said = capsys.readouterr().out
    assert "all nodes" not in said
    assert "rate: none: the round is finished" in said
    one = earned()
    two = one.model_copy(update={"nodes": one.nodes * 2, "total": one.total.model_copy(update={"name": ""})})
    keys.show_earnings(two, rates, Unit("EUR", 2))
    assert "all nodes" in capsys.readouterr().out


def test_several_rounds_have_a_total_for_each_unit() -> None:
    row = earned().total
    units = (Unit("EUR", 2), Unit("EUR", 4), CREDITS)
    assert list(keys.total_lines([(row, unit) for unit in units])) == [
        "total of 2 rounds: 0.000002 EUR pending, 0.000004 EUR payable, 0.000006 EUR being paid, 0.000008 EUR paid",
    ]
    assert list(keys.total_lines([(row, CREDITS)])) == []


def test_credits_of_several_rounds_are_not_added_since_each_operator_values_its_own() -> None:
    row = earned().total
    assert list(keys.total_lines([(row, CREDITS), (row, CREDITS)])) == []


def test_a_rate_that_the_coordinator_does_not_report_is_not_shown_as_zero(capsys: pytest.CaptureFixture[str]) -> None:
    keys.show_earnings(earned(), None, CREDITS)
    assert "rate: not known" in capsys.readouterr().out
    keys.show_earnings(earned(), None, CREDITS, as_json=True)
    assert json.loads(capsys.readouterr().out)["rates"] is None
