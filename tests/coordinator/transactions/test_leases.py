"""The lease table: bounded by staleness and budget, fair to whoever works, and no prompt is ever lost."""

from pathlib import Path

import pytest

from coordinator.reports.summary import leaderboard
from coordinator.store import tables
from coordinator.store.facts import FINISHED, set_fact
from coordinator.transactions import leases, tally
from protocol.errors import UnknownNode
from protocol.wire.signing import NodeKey
from protocol.work.lease import LeaseEvent
from protocol.work.rollout import Sample, pack_logprobs, pack_tokens, unpack_tokens
from tests.coordinator.world import END, MAX_COST, PRICE, World, answer


def prompts(world: World, key: NodeKey, groups: int = 1) -> list[int]:
    """Take leases and say for which group numbers."""
    return [int(unpack_tokens(lease.prompt)[0]) - 10 for lease in world.offer(key, groups=groups).leases]


def test_a_node_gets_what_it_asks_for(world: World) -> None:
    key = world.join(1)
    reply = world.offer(key, groups=3)
    assert reply.reason == ""
    assert len({lease.lease_id for lease in reply.leases}) == 3
    assert len({lease.seed for lease in reply.leases}) == 3
    assert {lease.expires_ms for lease in reply.leases} == {world.now_ms + world.terms.timeout_ms}
    assert [unpack_tokens(lease.prompt).tolist() for lease in reply.leases] == [[10], [11], [12]]
    assert world.group_states() == {0: "leased", 1: "leased", 2: "leased"}


def test_a_stranger_gets_nothing(world: World) -> None:
    with pytest.raises(UnknownNode):
        world.offer(NodeKey(b"s" * 32))
    assert world.group_states() == {}


@pytest.mark.parametrize("groups", [1, 5, 6, 7, 64])
def test_admission_ends_where_staleness_would_begin(world: World, groups: int) -> None:
    """S = 2 and B = 2: version 1 may serve batches 1, 2 and 3, which are six groups."""
    key = world.join(1)
    assert len(world.offer(key, groups=groups).leases) == min(groups, 6)
    assert len(world.offer(key, groups=groups).leases) == max(0, min(groups, 6 - groups))
    world.offer(key, groups=64)
    assert world.offer(key).reason == "ahead"


def test_with_a_bound_of_zero_the_round_is_the_synchronous_loop(tmp_path: Path) -> None:
    """Sample a batch from the newest version, train, publish; nothing is sampled meanwhile."""
    world = World(tmp_path, staleness=0)
    world.publish(1, 0)
    key = world.join(1)
    for number in range(1, 4):
        for _ in range(2):
            world.earn(key, version=number)
        assert world.offer(key, version=number).reason == "ahead"
        assert {group.policy_update for group in world.train(number).groups} == {number - 1}
        assert world.offer(key, version=number).reason == "old_version"
        world.publish(number + 1, number)
    world.database.close()


def test_one_request_gets_no_more_than_the_operator_allows(tmp_path: Path) -> None:
    world = World(tmp_path, groups_per_request=2)
    world.publish(1, 0)
    assert len(world.offer(world.join(1), groups=64).leases) == 2
    world.database.close()


def test_lease_hoarding_leaves_work_for_others(tmp_path: Path) -> None:
    world = World(tmp_path, groups_per_request=2)
    world.publish(1, 0)
    hoarder, honest = world.join(1), world.join(2)
    taken = [len(world.offer(hoarder, groups=64).leases) for _ in range(4)]
    assert taken == [2, 2, 0, 0]
    assert world.offer(hoarder).reason == "busy"
    assert len(world.offer(honest, groups=64).leases) == 2
    world.database.close()


def test_lease_griefing_ends_at_none_for_longer_and_longer_and_honest_answers_bring_more(tmp_path: Path) -> None:
    """Claims all it can and lets it expire, again and again; then it answers."""
    world = World(tmp_path, staleness=8, size=8, newcomer_leases=4)
    world.publish(1, 0)
    key = world.join(1)
    taken = []
    for _ in range(9):
        taken.append(len(world.offer(key, groups=64).leases))
        world.now_ms += world.terms.timeout_ms
        world.expire()
    assert taken == [4, 1, 0, 1, 0, 0, 1, 0, 0]
    assert world.offer(key).reason == "busy"
    world.now_ms += 2 * world.terms.timeout_ms
    for expected in (1, 2, 4, 8, 8):
        given = world.offer(key, groups=64).leases
        assert len(given) == expected
        assert world.submit(key, answer(key, given[0])).outcome == "accepted"
        for lease in given[1:]:  # as if the coordinator had taken them back
            world.run(leases.move, lease.lease_id, LeaseEvent.CANCEL, world.terms, world.now_ms)
    world.database.close()


def test_a_node_gets_no_more_than_it_finishes_in_half_of_a_leases_time(tmp_path: Path) -> None:
    world = World(tmp_path, staleness=8, size=8)
    world.publish(1, 0)
    key = world.join(1)
    for _ in range(4):
        lease = world.lease(key)
        world.now_ms += world.terms.timeout_ms // 8
        world.submit(key, answer(key, lease))
    assert len(world.offer(key, groups=64).leases) == 4
    world.database.close()


def test_a_new_version_opens_the_gate_again(world: World) -> None:
    key = world.join(1)
    for _ in range(6):
        world.earn(key)
    assert world.offer(key).reason == "ahead"
    world.train(1)
    assert world.offer(key).reason == "ahead"
    world.publish(2, 1)
    assert world.offer(key, version=1).reason == "old_version"  # waiting is in vain, the newer one has work
    assert len(world.offer(key, version=2, groups=64).leases) == 2


def test_a_version_past_the_bound_gets_no_work(world: World) -> None:
    key = world.join(1)
    world.publish(2, 2)
    for number in (1, 2, 3):
        world.earn(key, version=2)
        world.earn(key, version=2)
        world.train(number)
    reply = world.offer(key, version=1)
    assert (reply.reason, reply.newest_version) == ("old_version", 2)
    assert world.offer(key, version=2).leases


@pytest.mark.parametrize("version", [2, 2**40])
def test_a_version_that_was_never_published_gets_no_work(world: World, version: int) -> None:
    assert world.offer(world.join(1), version=version).reason == "old_version"


@pytest.mark.parametrize(("budget_micros", "leases"), [(0, 0), (MAX_COST - 1, 0), (MAX_COST, 1), (3 * MAX_COST + 1, 3)])
def test_the_budget_covers_the_dearest_answer_to_every_lease(tmp_path: Path, budget_micros: int, leases: int) -> None:
    world = World(tmp_path, budget_micros=budget_micros)
    world.publish(1, 0)
    key, other = world.join(1), world.join(2)
    given = world.offer(key, groups=64).leases
    assert len(given) == leases
    assert world.offer(other).reason == "budget"
    dearest = [[20 + number, 21, 22, END] for number in range(2)]
    for lease in given:
        verdict = world.submit(key, answer(key, lease, samples=tuple(map(sample_of, dearest))))
        assert (verdict.outcome, verdict.credit_micros) == ("accepted", MAX_COST)
    assert world.offer(other).reason == "budget"
    world.database.close()


def test_what_an_answer_leaves_of_its_reserve_is_free_again(tmp_path: Path) -> None:
    world = World(tmp_path, budget_micros=MAX_COST + 4)
    world.publish(1, 0)
    key = world.join(1)
    world.earn(key)  # 4 of 8 reserved micros
    assert world.budget() == MAX_COST
    assert len(world.offer(key, groups=2).leases) == 1
    world.database.close()


def test_a_node_that_works_for_nothing_needs_no_budget(tmp_path: Path) -> None:
    world = World(tmp_path, budget_micros=0)
    world.publish(1, 0)
    key = world.join(1, price=0)
    assert world.earn(key).credit_micros == 0
    world.database.close()


def test_a_price_raised_after_the_lease_does_not_count_for_it(world: World) -> None:
    key = world.join(1)
    lease = world.lease(key)
    world.join(1, price=5 * PRICE)
    assert world.submit(key, answer(key, lease)).credit_micros == 4
    assert world.lease(key).price_micros_per_mtok == 5 * PRICE


def test_after_the_end_there_is_no_more_work(world: World) -> None:
    key = world.join(1)
    world.run(set_fact, FINISHED, True)
    assert world.offer(key).reason == "finished"


def test_a_silent_nodes_prompt_goes_to_the_next_one_first(world: World) -> None:
    silent, next_one = world.join(1), world.join(2)
    assert prompts(world, silent, 2) == [0, 1]
    world.now_ms += world.terms.timeout_ms - 1
    assert world.expire() == 0
    assert prompts(world, next_one) == [2]
    world.now_ms += 1
    assert world.expire() == 2
    assert prompts(world, next_one, 3) == [0, 1, 3]


def test_a_request_for_work_finds_expired_leases_by_itself(world: World) -> None:
    silent, next_one = world.join(1), world.join(2)
    assert prompts(world, silent, 6) == [0, 1, 2, 3, 4, 5]
    assert world.offer(next_one).reason == "ahead"
    world.now_ms += world.terms.timeout_ms
    assert prompts(world, next_one) == [0]


def test_a_lease_given_back_is_offered_again_at_once(world: World) -> None:
    key, other = world.join(1), world.join(2)
    first, second = world.offer(key, groups=2).leases
    assert world.give_back(key, first) == 1
    assert world.lease_states() == {first.lease_id: "skipped", second.lease_id: "offered"}
    assert prompts(world, other) == [0]


def test_nobody_gives_back_anothers_lease(world: World) -> None:
    key, thief = world.join(1), world.join(2)
    lease = world.lease(key)
    before = world.dump()
    assert world.give_back(thief, lease) == 0
    assert world.dump() == before
    assert world.submit(key, answer(key, lease)).outcome == "accepted"


def test_a_lease_that_ended_cannot_be_given_back(world: World) -> None:
    key = world.join(1)
    answered, expired = world.offer(key, groups=2).leases
    world.submit(key, answer(key, answered))
    world.now_ms += world.terms.timeout_ms
    world.expire()
    before = world.dump()
    assert world.give_back(key, answered, expired, expired) == 0
    assert world.dump() == before


def test_a_lease_given_back_twice_frees_its_prompt_once(world: World) -> None:
    key, other = world.join(1), world.join(2)
    lease = world.lease(key)
    assert world.give_back(key, lease, lease) == 1
    assert prompts(world, other) == [0]
    assert world.give_back(key, lease) == 0
    assert world.group_states() == {0: "leased"}


def test_a_debt_of_reserves_takes_no_groups(tmp_path: Path) -> None:
    """Reserves above the budget come from a changed configuration; they must stop leases, not multiply them."""
    world = World(tmp_path, budget_micros=2 * MAX_COST)
    world.publish(1, 0)
    key, other = world.join(1), world.join(2)
    given = world.offer(key, groups=2).leases
    world.run(lambda conn: conn.execute(tables.leases.update().values(max_cost_micros=3 * MAX_COST)))
    world.run(tally.recount)
    world.give_back(key, given[0])
    assert world.offer(other, groups=8).reason == "budget"
    assert world.group_states() == {0: "open", 1: "leased"}
    world.database.close()


def sample_of(tokens: list[int]) -> Sample:
    return Sample(tokens=pack_tokens(tokens), logprobs=pack_logprobs([-0.5] * len(tokens)), finish="stop")


def test_the_leaderboard_says_what_share_of_its_leases_a_node_skipped_and_let_expire(world: World) -> None:
    key, other = world.join(1), world.join(2)
    answered, skipped, *_expired = world.offer(key, groups=4).leases
    world.submit(key, answer(key, answered))
    world.give_back(key, skipped)
    world.now_ms += world.terms.timeout_ms
    world.expire()
    world.earn(other)
    board = {row["node_id"]: row for row in world.run(leaderboard)}
    shares = {node: (row["skipped_share"], row["expired_share"]) for node, row in board.items()}
    assert shares == {key.node_id: (0.25, 0.5), other.node_id: (0.0, 0.0)}
    assert board[key.node_id]["leases"] == {"accepted": 1, "skipped": 1, "expired": 2}


class TestAway:
    """A coordinator that was not there: nobody's time was over meanwhile."""

    BACK_MS = 100

    def pardon(self, world: World, alive_ms: int) -> int:
        terms = {"timeout_ms": world.terms.timeout_ms, "back_ms": self.BACK_MS}
        pardoned: int = world.run(leases.extend_after_downtime, alive_ms=alive_ms, now_ms=world.now_ms, **terms)
        return pardoned

    def test_times_are_of_this_century(self, world: World) -> None:
        """A number of milliseconds since 1970 is longer than what PostgreSQL calls an integer."""
        world.now_ms = 1_800_000_000_000
        lease = world.lease(world.join(1))
        world.now_ms += 10 * world.terms.timeout_ms
        assert self.pardon(world, lease.expires_ms - 1) == 1
        assert world.rows(tables.leases)[0]["expires_ms"] > world.now_ms

    def test_an_outage_longer_than_a_lease_blames_nobody(self, world: World) -> None:
        key = world.join(1)
        first, second = (world.lease(key) for _ in range(2))
        died_ms = world.now_ms + 400
        world.now_ms = died_ms + 50 * world.terms.timeout_ms
        assert self.pardon(world, died_ms) == 2
        assert world.expire() == 0
        assert world.rows(tables.nodes)[0]["lease_allowance"] is None
        world.now_ms += world.terms.timeout_ms - 400 + self.BACK_MS - 1
        assert world.submit(key, answer(key, first)).outcome == "accepted"
        world.now_ms += 1
        assert world.submit(key, answer(key, second)).code == "lease_closed", "what was left of its time is over"

    def test_a_lease_lasts_hardly_longer_than_a_new_one_however_often_it_is_pardoned(self, world: World) -> None:
        world.lease(world.join(1))
        world.now_ms += 100
        for _ in range(3):
            self.pardon(world, 0)
        (row,) = world.rows(tables.leases)
        assert row["expires_ms"] == world.now_ms + world.terms.timeout_ms + self.BACK_MS

    def test_a_lease_that_was_over_before_stays_over(self, world: World) -> None:
        world.lease(world.join(1))
        died_ms = world.now_ms + world.terms.timeout_ms
        world.now_ms = died_ms + 10_000
        assert self.pardon(world, died_ms) == 0
        assert world.expire() == 1

    def test_the_staleness_bound_holds_for_work_that_was_pardoned(self, tmp_path: Path) -> None:
        world = World(tmp_path, staleness=0, size=1)
        world.publish(1, 0)
        slow, quick = world.join(1), world.join(2)
        lease = world.lease(slow)
        world.run(lambda connection: connection.execute(tables.groups.update().values(state="open")))
        world.run(tally.recount)
        world.earn(quick)
        world.train(1)
        world.run(lambda connection: connection.execute(tables.leases.update().values(surplus=False)))
        died_ms, world.now_ms = world.now_ms, world.now_ms + 10 * world.terms.timeout_ms
        assert self.pardon(world, died_ms) == 1
        assert world.submit(slow, answer(slow, lease)).code == "stale_version"
        world.database.close()
