"""The real swarm of bench/anchor and its simulated twin have the same machines, links and rules."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bench.anchor.__main__ import foretold, rounds
from bench.anchor.books import Measured
from bench.anchor.engine import PacedEngine
from bench.anchor.setting import ADMISSIONS, AT_ONCE, LINKS, Case, group_s, links, machines, paced_s
from bench.broadcast.cells import PAYLOAD_SHARE
from bench.broadcast.contender import SOURCE
from protocol.work.rollout import pack_tokens
from swarm_node.engine.messages import GroupDone, SampleRequest
from tests.tiny_policy import make_tiny_policy

FOUND = Measured(
    train_s=12.0,
    size_mb=4.4,
    answer_s=0.4,
    hear_s=0.5,
    load_s=0.5,
    step_s=19.0,
    bubble=0.3,
    broadcast_s=11.0,
    discarded_share=0.0,
    age_mean=1.0,
    cost_per_update=0.07,
)


def test_both_swarms_have_the_same_machines_and_links() -> None:
    capped = links()
    assert capped[SOURCE].up_bit_s == 1e6 * LINKS.source_mbit
    for node in machines():
        assert capped[node.name].up_bit_s == pytest.approx(8 * node.links.up / PAYLOAD_SHARE)
        assert capped[node.name].down_bit_s == pytest.approx(8 * node.links.down / PAYLOAD_SHARE)
        assert node.hands == AT_ONCE
    slower = machines(answer_s=2.0)
    assert [group_s(node) for node in slower] == pytest.approx([group_s(node) + 2.0 for node in machines()])


@pytest.mark.parametrize("admission", ADMISSIONS)
def test_what_was_measured_is_what_the_simulator_is_given(admission: str) -> None:
    case = next(Case(one, 8) for one in ADMISSIONS if one == admission)
    assert case.config().staleness.admission == admission
    told, slower = foretold(case, FOUND), foretold(case, replace(FOUND, train_s=100.0))
    assert (told.train_s, told.size_mb, told.load_s) == (FOUND.train_s, FOUND.size_mb, FOUND.load_s)
    assert told.step_s > FOUND.train_s
    assert slower.bubble < told.bubble


def test_a_round_that_is_recorded_is_not_played_again(tmp_path: Path) -> None:
    record = tmp_path / "anchor.jsonl"
    record.write_text(json.dumps({"case": asdict(Case("visible", 8)), "found": asdict(FOUND)}) + "\n")
    assert list(rounds(["visible"], 1, 8, record)) == [(Case("visible", 8), FOUND)]


def test_a_group_is_handed_out_when_its_time_has_come_and_not_before(tmp_path: Path) -> None:
    engine = PacedEngine(group_s=0.0, at_once=1)
    engine.load(make_tiny_policy(tmp_path / "policy"), 1)
    engine._group_s = 3600.0
    engine.add(_request("long"))
    engine._group_s = 0.0
    engine.add(_request("short"))
    said = [answer for _ in range(8) for answer in engine.step()]
    assert [answer.request_id for answer in said if isinstance(answer, GroupDone)] == ["short"]
    assert engine.busy
    assert engine.cancel(["long", "unknown"]) == ["long"]
    assert not engine.busy
    assert engine.measured().decode_s == pytest.approx(paced_s(1, 3600.0))


def _request(name: str) -> SampleRequest:
    return SampleRequest(
        request_id=name, version=1, prompt=pack_tokens([5, 6]), seed=1, samples=2, max_new_tokens=3, temperature=1.0
    )
