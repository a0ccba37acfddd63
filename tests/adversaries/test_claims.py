"""Attacks on what claims mean and on whose keys they are, for a few groups on a tiny policy."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from coordinator.transactions import owners
from tests.adversaries import answers, mismatch, poisoning, theft, waiting
from tests.adversaries.__main__ import tiny
from tests.adversaries.arena import Arena, Stage
from tests.adversaries.campaign import Result, fight
from tests.coordinator.transactions.test_owners import OWNER, owner_of


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    torch.set_num_threads(1)
    return tiny(tmp_path_factory.mktemp("policies"))


@pytest.fixture
def arena(tmp_path: Path, stage: Stage) -> Iterator[Arena]:
    made = Arena(tmp_path, stage)
    yield made
    made.world.database.close()


def unharmed(result: Result) -> bool:
    return (result.honest_hard_faults, result.honest_voided_micros) == (0, 0) and result.honest_groups > 0


class TestStructuralMismatch:
    def test_tokens_that_were_told_and_answered_again_are_found_at_once_and_earn_nothing(self, stage: Stage) -> None:
        result = fight(mismatch.ToldTwice, stage, 20)[-1]
        assert result.banned
        assert result.noticed_after == 1
        assert result.gain_micros <= 0
        assert unharmed(result)

    def test_parts_and_bytes_that_disagree_are_refused_and_answers_paid_by_their_tokens(self, stage: Stage) -> None:
        kinds = {*mismatch.PARTS, *mismatch.FORMS}
        _, attacker, result = fight(mismatch.Disagreeing, stage, len(kinds))
        assert {name.partition("/")[2] for name in attacker.cheated} == kinds
        assert (attacker.taken, attacker.overpaid) == ([], [])
        assert set(attacker.codes) == {"malformed_message", "not taken", "not_canonical"}
        assert (attacker.hard_faults, result.gain_micros, attacker.accepted) == (0, 0, result.groups)
        assert unharmed(result)

    def test_the_second_fragment_that_is_spoilt_would_be_taken_whole(self, arena: Arena) -> None:
        """Else each kind of mismatch might be refused for something else."""
        node = mismatch.Disagreeing(arena, 1)
        (lease,) = arena.world.offer(node.key).leases
        said = arena.sample(arena.policy(1), lease)
        assert not node.in_parts(lease, said, lambda sound: sound)


class TestCodeInAnAnswer:
    def test_no_reading_of_an_answer_but_its_own_is_rewarded(self, arena: Arena) -> None:
        node = answers.Speller(arena, 1)
        for _ in range(0, 2 * len(answers.SPELLINGS), arena.stage.samples):
            (lease,) = arena.world.offer(node.key).leases
            made = node.forge(lease, ())
            assert node.submit(lease, made).outcome == "accepted", "the policy could have said so, if hardly"
        assert node.said >= 2 * len(answers.SPELLINGS)
        assert node.rewarded == []

    def test_code_in_an_answer_is_found_by_its_tokens_and_earns_nothing(self, stage: Stage) -> None:
        result = fight(answers.Speller, stage, 8)[-1]
        assert result.banned
        assert result.gain_micros <= 0
        assert unharmed(result)


class TestKeyTheft:
    def test_a_stolen_key_moves_neither_node_nor_pay_and_ends_with_its_revocation(self, stage: Stage) -> None:
        _, thief, result = fight(theft.KeyThief, stage, 40)
        assert thief.key is not thief.stolen, "the owner has revoked it and goes on"
        assert {"owner_conflict", "unknown_owner", "key_revoked", "lease_closed"} <= set(thief.codes)
        assert result.groups == 40
        assert not result.banned
        assert thief.hard_faults == 1, "after the revocation nothing of the thief's came to an audit"
        assert unharmed(result)

    def test_who_takes_all_that_a_stolen_key_can_has_its_owner_banned_and_earns_nothing(self, stage: Stage) -> None:
        result = fight(theft.GreedyThief, stage, 40)[-1]
        assert result.banned
        assert result.gain_micros <= 0
        assert unharmed(result)

    def test_a_thief_finds_the_node_and_its_address_as_they_were(self, arena: Arena) -> None:
        thief = theft.KeyThief(arena, 1)
        thief.grab()
        assert owner_of(arena.world, thief.stolen) == OWNER.node_id
        assert arena.world.run(owners.addresses, arena.world.now_ms) == {OWNER.node_id: "text:mine"}


def test_forged_groups_that_are_to_teach_something_else_earn_nothing(stage: Stage) -> None:
    _, poisoner, result = fight(poisoning.Poisoner, stage, 16)
    assert len(poisoner.keys) > 1
    assert result.gain_micros <= 0
    assert unharmed(result)


def test_many_keys_that_each_work_until_not_all_is_audited_gain_nothing(stage: Stage) -> None:
    _, crowd, result = fight(waiting.ManyKeys, stage, 48)
    assert len(crowd.keys) > 1
    assert result.gain_micros <= 0
    assert unharmed(result)
