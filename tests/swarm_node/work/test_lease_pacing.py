"""The choice of the leases that are begun."""

from protocol.work.lease import Lease, Prefix
from protocol.work.rollout import pack_tokens
from swarm_node.work.lease_pacing import NodePace, sort_out

NOW_MS = 1_000_000


def lease(number: int, *, ends_in_s: float = 60.0, samples: int = 10, price: int = 100, done: int = 0) -> Lease:
    tokens = pack_tokens([1])
    prefixes = tuple(Prefix(tokens=tokens, finish="stop" if n < done else "") for n in range(samples)) if done else ()
    return Lease(
        lease_id=f"{number:032x}",
        version=1,
        seed=number,
        samples=samples,
        prompt=tokens,
        price_micros_per_mtok=price,
        expires_ms=NOW_MS + int(1000 * ends_in_s),
        prefixes=prefixes,
    )


def begun(*leases: Lease, pace: NodePace | None = None, floor: int = 0) -> list[int]:
    found = sort_out(leases, now_ms=NOW_MS, pace=pace or NodePace(), price_floor=floor)
    assert {one.lease_id for one in found.begun} | set(found.declined) == {one.lease_id for one in leases}
    assert bool(found.declined) == bool(found.why)
    return [one.seed for one in found.begun]


def test_a_node_that_does_not_know_its_pace_begins_whatever_has_not_expired() -> None:
    assert begun(lease(1), lease(2, ends_in_s=0.0), lease(3, ends_in_s=-5.0), lease(4, ends_in_s=0.001)) == [1, 4]


def test_only_as_much_is_begun_as_can_be_met_together() -> None:
    pace = NodePace(tokens_per_s=100.0, tokens_per_sample=100.0)  # ten seconds a lease
    assert begun(*(lease(n, ends_in_s=35.0) for n in range(5)), pace=pace) == [0, 1, 2]


def test_a_lease_that_cannot_be_met_takes_no_time_from_the_next() -> None:
    pace = NodePace(tokens_per_s=100.0, tokens_per_sample=100.0)
    assert begun(lease(1, ends_in_s=5.0), lease(2, ends_in_s=10.0), pace=pace) == [2]


def test_what_others_have_finished_needs_no_time() -> None:
    pace = NodePace(tokens_per_s=100.0, tokens_per_sample=100.0)
    assert begun(lease(1, ends_in_s=1.5), pace=pace) == []
    assert begun(lease(1, ends_in_s=1.5, done=9), pace=pace) == [1]


def test_the_floor_declines_what_pays_less() -> None:
    assert begun(lease(1, price=99), lease(2, price=100), floor=100) == [2]


def test_a_turn_takes_no_longer_than_its_own_bound() -> None:
    """A node whose samples are long can meet a short turn."""
    pace = NodePace(tokens_per_s=100.0, tokens_per_sample=1000.0)
    turn = lease(1, ends_in_s=1.5).model_copy(update={"turn_tokens_max": 10})
    assert begun(turn, lease(2, ends_in_s=1.5), pace=pace) == [1]
