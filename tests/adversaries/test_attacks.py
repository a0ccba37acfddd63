"""Each attack for a few groups on a tiny policy: noticed, unpaid, and nobody else harmed."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from coordinator.audit.exact_scorer import own_class
from tests.adversaries import choosing, forging, leasing, payloads, weights
from tests.adversaries.__main__ import tiny
from tests.adversaries.arena import Arena, Stage
from tests.adversaries.campaign import Result, fight
from tests.adversaries.nodes import Adversary

GROUPS = 8


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    torch.set_num_threads(1)
    return tiny(tmp_path_factory.mktemp("policies"))


def unharmed(result: Result) -> bool:
    return (result.honest_hard_faults, result.honest_voided_micros) == (0, 0) and result.honest_groups > 0


@pytest.mark.parametrize(
    "attack",
    [
        forging.Canned,
        forging.OldWork,
        forging.Copied,
        forging.OneToken,
        weights.Small,
        weights.SmallPrefilled,
        choosing.EarlyEnd,
    ],
    ids=lambda attack: attack.__name__,
)
def test_tokens_that_the_lease_did_not_dictate_are_found_at_once_and_earn_nothing(
    attack: type[Adversary], stage: Stage
) -> None:
    result = fight(attack, stage, GROUPS)[-1]
    assert result.banned
    assert result.noticed_after is not None
    assert result.noticed_after <= attack.wants, "found before the next leases were asked for"
    assert result.gain_micros <= 0
    assert unharmed(result)


@pytest.mark.parametrize(
    "attack",
    [forging.OneToken, weights.SmallPrefilled, weights.EightBitsPrefilled],
    ids=lambda attack: attack.__name__,
)
def test_in_the_exact_class_every_group_with_another_token_is_found_and_only_such_a_group(
    attack: type[Adversary], stage: Stage
) -> None:
    """Weights in 8 bits change no token of this tiny policy: their work is honest work."""
    exact = replace(stage, tolerance=own_class(stage.policies[0], threads=1))
    result = fight(attack, exact, GROUPS)[-1]
    assert bool(result.cheats) == (attack is not weights.EightBitsPrefilled)
    assert result.banned == bool(result.cheats)
    assert result.gain_micros <= 0
    assert unharmed(result)


def test_work_that_is_sent_again_is_credited_once(stage: Stage) -> None:
    _, attacker, result = fight(forging.SentTwice, stage, GROUPS)
    assert set(attacker.codes) == {"lease_conflict"}
    assert attacker.accepted == result.groups
    assert result.gain_micros == 0
    assert unharmed(result)


def test_a_kept_version_is_found_when_the_next_one_is_out(stage: Stage) -> None:
    result = fight(weights.StalePrefilled, stage, 40)[-1]
    assert result.banned
    assert result.gain_micros <= 0
    assert unharmed(result)


def test_every_hostile_payload_is_refused_by_its_name(stage: Stage, tmp_path: Path) -> None:
    arena = Arena(tmp_path, stage)
    node = payloads.Hostile(arena, 1)
    for _ in payloads.SPOILT:
        (lease,) = arena.world.offer(node.key).leases
        node.work(lease, arena.sample(stage.policies[0], lease))
    assert node.said == {name: {code} for name, (_, code) in payloads.SPOILT.items()}
    assert node.accepted == 0
    arena.world.database.close()


def test_garbage_for_a_rivals_leases_harms_only_its_sender(stage: Stage) -> None:
    _, attacker, result = fight(payloads.FalseAccuser, stage, 3)
    assert set(attacker.codes) == {"lease_of_another"}
    assert unharmed(result)


def test_leases_that_are_not_answered_pay_nothing_and_hold_nobody_up(stage: Stage) -> None:
    result = fight(leasing.Griefer, stage, 4)[-1]
    assert result.cheats == result.groups
    assert result.gain_micros == 0
    assert unharmed(result)


def test_prompts_that_are_given_back_are_answered_by_others(stage: Stage) -> None:
    result = fight(choosing.CherryPicker, stage, GROUPS)[-1]
    assert result.cheats > 0
    assert result.gain_micros == 0
    assert unharmed(result)


def test_a_price_that_is_raised_under_way_counts_for_later_leases_only(stage: Stage) -> None:
    result = fight(leasing.PriceRaiser, stage, GROUPS)[-1]
    assert result.cheats == 0
    assert unharmed(result)
