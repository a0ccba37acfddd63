"""`swarm-node why`: every number of a report that a person needs, and how to repeat the check."""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from coordinator.rules.calibration import SHIPPED, read
from coordinator.rules.replay import ReplayMeasurement
from coordinator.rules.verdict import judge
from ledger.book import ClaimState
from protocol.errors import ProofInvalid
from protocol.policy.chunks import digest
from protocol.wire.signing import NodeKey
from protocol.work.auditing import Explanation, Explanations
from protocol.work.lease import Lease, LeaseState
from protocol.work.rollout import RolloutClaim, Sample, pack_tokens
from swarm_node.commands import why
from swarm_node.coordinator_api.join_string import JoinString
from swarm_node.keys import identity
from tests.processes.programs import script
from tests.swarm_node.web import web

LEASE, CLAIM = "1" * 32, "2" * 64
AGAIN = f"swarm-node why {LEASE} --replay"


def told(finding: str, report: dict[str, Any], appeal: Any = "", claim_id: str = CLAIM) -> Explanation:
    return Explanation(
        lease_id=LEASE, claim_id=claim_id, state="pending", code="", said="", finding=finding, appeal=appeal,
        ruling="", report=json.dumps(report).encode(), lease=b"", rollout=b"",
    )  # fmt: skip


def a_report() -> dict[str, Any]:
    """A real one: at position 2 another token than the dictated one, at 5 a wrong log-probability."""
    claimed, dictated = np.arange(10), np.arange(10)
    dictated[2] = 77
    margins, said = np.zeros(10), np.full(10, -0.5)
    margins[2], said[5] = 31.25, -0.125
    measured = ReplayMeasurement(
        sample=np.zeros(10, np.int64),
        position=np.arange(10),
        context=np.arange(10),
        claimed=claimed,
        dictated=dictated,
        margins=margins,
        claimed_logprobs=said,
        logprobs=np.full(10, -0.5) - (np.arange(10) == 5) * 40.0,
    )
    calibration = read(SHIPPED)
    return judge(measured, calibration.tolerances_of("torch/fp32/cpu"), calibration.version).to_json()


def test_a_position_says_what_was_claimed_and_what_is_so_in_tokens_and_in_log_probabilities() -> None:
    text = "\n".join(why.lines(told("hard", a_report())))
    assert "sample 0, position 2: token 2 claimed with -0.5000; expected 77 by 31.2 nats" in text
    assert "sample 0, position 5: token 5 claimed with -0.1250, the expected token; the replay gives -40.5000" in text
    assert "validator replay/7, tolerances torch/fp32/cpu" in text


def test_the_note_of_an_audit_is_shown_on_one_line() -> None:
    shown = list(why.lines(told("pass", a_report() | {"note": "Not to the bit.\nlease 1: posted"})))
    (line,) = [line for line in shown if "Not to the bit." in line]
    assert "lease 1: posted" in line
    assert "\n" not in line


@pytest.mark.parametrize(("finding", "appeal"), [("soft", ""), ("hard", "denied"), ("hard", "possible"), ("", "")])
def test_whatever_became_of_a_claim_the_line_that_repeats_its_check_is_there(finding: str, appeal: str) -> None:
    assert AGAIN in "\n".join(why.lines(told(finding, a_report(), appeal)))


def test_a_check_is_offered_only_while_its_version_is_in_this_home() -> None:
    lease = Lease(
        lease_id=LEASE, version=32, seed=1, samples=1, prompt=pack_tokens([1]), price_micros_per_mtok=1, expires_ms=1
    )
    good = told("pass", a_report()).model_copy(update={"lease": lease.to_bytes()})
    assert AGAIN in "\n".join(why.lines(good, lambda version: version == 32))
    gone = "\n".join(why.lines(good, lambda _: False))
    assert AGAIN not in gone
    assert "this home no longer has version 32" in gone


def test_a_lease_that_cannot_be_read_does_not_hide_what_else_is_known() -> None:
    text = "\n".join(why.lines(told("hard", a_report()).model_copy(update={"lease": b"\xc1"})))
    assert "sample 0, position 2" in text
    assert AGAIN in text


def test_leases_that_the_running_agent_knows_have_time_tokens_and_credit() -> None:
    answer = {"at_ms": 1_000, "lease_id": LEASE, "claim_id": CLAIM, "outcome": "accepted", "tokens": 115}
    state = {"unit": {"name": "EUR", "decimals": 4}, "answers": [answer | {"credit_micros": 115}]}
    figures = why.figures_of(state, 181_000)
    answers = Explanations(tolerance="", tolerances=b"", explanations=(told("pass", {}),))
    listed = list(why.report(answers, [], as_json=False, figures=figures))
    assert listed[0] == f"lease {LEASE}: pending, audit: pass; answered 3 min 0 s ago, 115 tokens, 0.000115 EUR"
    assert why.figures_of({}, 0) == {}


def test_what_was_never_answered_cannot_be_repeated() -> None:
    assert AGAIN not in "\n".join(why.lines(told("", {}, claim_id="")))


def test_a_list_has_a_line_for_each_lease_and_all_about_those_that_failed() -> None:
    """And says what its words mean."""
    each = {
        "1" * 32: {"state": "posted", "finding": "pass"},
        "2" * 32: {"state": "pending", "finding": "waiting"},
        "3" * 32: {"state": "skipped", "finding": "", "claim_id": ""},
        "4" * 32: {"state": "voided", "finding": "hard", "code": "replay_mismatch"},
    }
    given = [told("pass", {}).model_copy(update={"lease_id": name, **fields}) for name, fields in each.items()]
    listed = list(why.report(Explanations(tolerance="", tolerances=b"", explanations=tuple(given)), [], as_json=False))
    assert listed[:6] == [
        f"lease {'1' * 32}: posted, audit: pass",
        f"lease {'2' * 32}: pending, audit: waiting",
        f"lease {'3' * 32}: skipped",
        f"lease {'4' * 32}: voided [replay_mismatch], audit: hard",
        f"  claim {CLAIM}",
        f"  repeat the check: `swarm-node why {'4' * 32} --replay`",
    ]
    assert [line.split()[0] for line in listed[7:-1]] == ["posted", "pending", "voided", "skipped"]
    assert "swarm-node why LEASE" in listed[-1]


def test_the_one_lease_that_is_named_is_told_in_full() -> None:
    good = told("pass", {})
    answer = Explanations(tolerance="", tolerances=b"", explanations=(good,))
    named = list(why.report(answer, [], about=LEASE, as_json=False))
    assert named == [*why.lines(good), why.LEGEND, f"  pending    {why.MEANING['pending']}"]
    assert f"  repeat the check: `{AGAIN}`" in named
    strange = Explanations(
        tolerance="", tolerances=b"", explanations=(good.model_copy(update={"state": "\x1b[2Jodd"}),)
    )
    assert list(why.report(strange, [], as_json=False)) == [f"lease {LEASE}: \\x1b[2Jodd, audit: pass", why.ONE]


def test_every_state_that_a_lease_can_have_is_explained() -> None:
    assert set(why.MEANING) == {*LeaseState, ClaimState.PENDING, ClaimState.POSTED, ClaimState.VOIDED}


def test_scripts_get_a_command_that_works_at_the_node_and_not_the_operators() -> None:
    report = a_report() | {"command": "swarm-coordinator audit replay ROUND.toml x"}
    answer = Explanations(tolerance="", tolerances=b"", explanations=(told("hard", report),))
    (line,) = why.report(answer, [], as_json=True)
    assert json.loads(line)["report"]["command"] == AGAIN


@pytest.mark.parametrize("answered", [(), (CLAIM,), ("3" * 64, CLAIM)])
def test_an_answer_about_something_else_is_none(answered: tuple[str, ...]) -> None:
    found = Explanations(
        tolerance="", tolerances=b"", explanations=tuple(told("hard", {}, claim_id=claim_id) for claim_id in answered)
    )
    assert why.answering("", found) == found
    if len(answered) == 1:
        assert why.answering(LEASE, found) == why.answering(CLAIM, found) == found
    for about in ("4" * 32, *[LEASE] * (len(answered) != 1)):
        with pytest.raises(ProofInvalid, match="another lease"):
            why.answering(about, found)


@pytest.mark.parametrize("named", [CLAIM, ""])
def test_a_claim_that_is_not_the_one_it_is_called_is_the_coordinators_fault(tmp_path: Path, named: str) -> None:
    """The log's text about one claim would be believed of the other."""
    key, join = NodeKey(bytes(32)), JoinString("http://127.0.0.1:1", "0" * 64)
    sample = Sample(tokens=pack_tokens([1]), logprobs=bytes(4), finish="stop")
    claim = RolloutClaim(round_id="0" * 64, lease_id=LEASE, lease_digest="2" * 64, samples=(sample,)).to_bytes()
    one = told("hard", {}, claim_id=digest(claim)).model_copy(update={"rollout": key.seal("rollout", claim)})
    why.require_own(join, tmp_path, key.node_id, one, lambda _line: None)
    with pytest.raises(ProofInvalid, match="shows another one"):
        why.require_own(join, tmp_path, key.node_id, one.model_copy(update={"claim_id": named}), lambda _line: None)


NO_REPORTS = [b"x", b"\xff", b"[]", b'{"findings":[{}]}', b"[" * 10_000, b'{"fits":[{"version":"\\ud800"}]}']


@pytest.mark.parametrize("report", NO_REPORTS, ids=lambda report: repr(report[:20]))
def test_a_report_that_is_none_hides_nothing_else_that_is_told(report: bytes) -> None:
    bad = told("hard", {}).model_copy(update={"report": report})
    good = told("hard", a_report()).model_copy(update={"lease_id": "5" * 32})
    answer = Explanations(tolerance="", tolerances=b"", explanations=(bad, good))
    text = "\n".join(why.report(answer, [], as_json=False))
    assert "report cannot be read" in text
    assert AGAIN in text
    assert "expected 77 by 31.2 nats" in text
    first, second = map(json.loads, why.report(answer, [], as_json=True))
    assert first["report"] == {"unreadable": True, "command": AGAIN}
    assert second["report"]["findings"][0]["positions"]


def test_scripts_get_all_of_a_report_also_what_later_auditors_add() -> None:
    report = a_report() | {"later": [1, {"more": None}]}
    answer = Explanations(tolerance="", tolerances=b"", explanations=(told("hard", report),))
    (line,) = why.report(answer, [], as_json=True)
    assert json.loads(line)["report"] == json.loads(json.dumps(report)) | {"command": AGAIN}


@pytest.mark.processes
def test_a_lie_that_the_log_shows_is_named_though_the_report_beside_it_is_none(tmp_path: Path) -> None:
    """Else a coordinator that is found out would only have to send one that `why` ends over."""
    home = tmp_path / "node"
    identity.load_or_create(home / identity.FILE)
    lie = told("hard", {}, claim_id="").model_copy(update={"report": b"\xff"})
    answer = Explanations(tolerance="", tolerances=b"", explanations=(lie,)).to_bytes()
    with web(lambda request: request.answer(200, answer)) as coordinator:
        command = [script("swarm-node"), "why", f"{coordinator.url}#{'0' * 64}", LEASE, "--home", str(home)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "names no claim" in ended.stderr
    assert "[proof_invalid]" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "report cannot be read" in ended.stdout


@pytest.mark.parametrize("tolerance", ["a/b/c\0", "x" * 200_000], ids=["nul", "endless"])
def test_a_class_that_no_command_can_be_given_is_no_answer(tolerance: str) -> None:
    with pytest.raises(ValidationError):
        Explanations(tolerance=tolerance, tolerances=b"", explanations=())
