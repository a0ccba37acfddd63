"""The order of chunks: in turn, and with more of the link for those behind; nobody is kept out by a word."""

import math
from collections import Counter

from swarm_node.p2p.turns import FRESH_S, Turns


def test_as_many_send_as_there_is_room_for_and_the_others_follow_in_their_order() -> None:
    turns = Turns[str](2)
    for who in "abcd":
        turns.wait(who, 0.0, is_behind=False)
    assert turns.admit(0.0) == ["a", "b"]
    assert turns.full
    turns.leave("a")
    assert turns.admit(0.0) == ["c"]
    turns.leave("d")  # takes its WANT back
    turns.leave("b")
    assert turns.admit(0.0) == []


def test_while_somebody_behind_is_served_half_of_the_others_wait() -> None:
    turns = Turns[str](32)
    turns.wait("behind", 0.0, is_behind=True)
    for who in "abcde":
        turns.wait(who, 0.0, is_behind=False)
    assert turns.admit(0.0) == ["behind", "a", "b", "c"]
    turns.leave("a")
    assert turns.admit(0.0) == []  # of four, two are under way
    turns.leave("b")
    assert turns.admit(0.0) == ["d"]
    turns.leave("behind")
    assert turns.admit(0.0) == ["e"]


def test_with_nobody_behind_or_everybody_all_send() -> None:
    for is_behind in (False, True):
        turns = Turns[int](32)
        for who in range(8):
            turns.wait(who, 0.0, is_behind=is_behind)
        assert turns.admit(0.0) == [*range(8)]


def test_nobody_waits_for_those_behind_longer_than_for_one_turn() -> None:
    turns = Turns[str](32)
    turns.wait("behind", 0.0, is_behind=True)
    for who in "abcd":
        turns.wait(who, 0.0, is_behind=False)
    assert turns.admit(0.0) == ["behind", "a", "b"]
    turns.leave("behind")
    turns.wait("behind", 1.0, is_behind=True)
    turns.wait("d", 1.0, is_behind=False)  # it asks again, and keeps its time
    assert turns.admit(1.0) == ["behind"]
    assert [turns.look_again_at(who, 1.0) for who in "ad"] == [math.inf, FRESH_S]
    assert turns.admit(FRESH_S) == ["c", "d"]


def test_who_finds_all_turns_taken_waits_while_it_is_patient() -> None:
    turns = Turns[str](1, patience_s=5.0)
    for who in "ab":
        turns.wait(who, 0.0, is_behind=False)
    assert turns.admit(0.0) == ["a"]
    assert [turns.look_again_at("b", now) for now in (0.0, FRESH_S, 7.0)] == [FRESH_S, 5.0, 7.0]
    assert [turns.waits_in_vain("b", now) for now in (4.9, 5.0)] == [False, True]
    assert not turns.waits_in_vain("a", 5.0)
    turns.leave("a")
    assert not turns.waits_in_vain("b", 5.0)
    assert turns.admit(5.0) == ["b"]


def test_a_crowd_at_one_address_keeps_nobody_at_another_out() -> None:
    """All that it holds it takes nothing of; so a turn gets free only now and then."""
    turns = Turns[str](32)
    for number in range(128):
        turns.wait(f"crowd {number}", 0.0, is_behind=False, group="crowd")
    holders = turns.admit(0.0)
    turns.wait("honest", 0.0, is_behind=False, group="honest")
    turns.leave(holders[0])
    assert turns.admit(20.0) == ["honest"]
    turns.wait("second", 20.0, is_behind=False, group="honest")
    turns.leave(holders[1])
    assert turns.admit(20.0) == ["second"]
    turns.leave(holders[2])
    assert turns.admit(20.0) == ["crowd 32"]


def test_addresses_change_no_order_where_all_are_one_or_all_are_different() -> None:
    for groups in ("aaaaaa", "abcdef"):
        turns = Turns[int](2)
        for who, group in enumerate(groups):
            turns.wait(who, 0.0, is_behind=False, group=group)
        order = turns.admit(0.0)
        for who in order:  # grows meanwhile
            turns.leave(who)
            order += turns.admit(0.0)
        assert order == [*range(6)]


def test_who_is_behind_gets_more_of_a_link_that_all_share_equally() -> None:
    """Alone among seven others it gets a fifth, its own share of what four and it are sent; else an eighth."""
    turns = Turns[str](32)
    for who in ("behind", *"abcdefg"):
        turns.wait(who, 0.0, is_behind=who == "behind")
    left = dict.fromkeys(turns.admit(0.0), 1.0)
    for place, who in enumerate(left):
        left[who] -= 0.1 * place  # else all end in the same moment
    sent: Counter[str] = Counter()
    while sent.total() < 1000:
        done = min(left, key=left.__getitem__)
        left = {who: chunks - left[done] for who, chunks in left.items() if who != done}
        sent[done] += 1
        turns.leave(done)
        turns.wait(done, 0.0, is_behind=done == "behind")
        left |= dict.fromkeys(turns.admit(0.0), 1.0)
    assert 190 <= sent["behind"] <= 210


def test_neither_one_behind_nor_many_in_step_that_take_nothing_make_others_wait_for_long() -> None:
    turns = Turns[str](32)
    turns.wait("liar", 0.0, is_behind=True)
    for slow in range(8):
        turns.wait(f"slow {slow}", 0.0, is_behind=False)
    assert len(turns.admit(0.0)) == 5
    for honest in range(8):
        turns.wait(f"honest {honest}", 1.0, is_behind=False)
    assert turns.admit(1.0) == [f"slow {slow}" for slow in range(4, 8)]  # with them half of sixteen are under way
    assert turns.admit(FRESH_S) == [f"honest {honest}" for honest in range(8)]


def test_a_crowd_that_says_it_is_behind_keeps_no_honest_requester_out() -> None:
    """All room is always wanted by those who lie; each chunk takes as long as any other."""
    turns = Turns[str](4)
    sent: Counter[str] = Counter()
    for liar in range(16):
        turns.wait(f"liar {liar}", 0.0, is_behind=True)
    turns.wait("honest", 0.0, is_behind=False)
    sending: list[str] = []
    while sent.total() < 1700:
        sending += turns.admit(0.0)
        done = sending.pop(0)
        sent[done] += 1
        turns.leave(done)
        turns.wait(done, 0.0, is_behind=done != "honest")
    assert sent["honest"] == 100
