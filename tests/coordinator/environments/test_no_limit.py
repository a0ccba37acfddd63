"""No-limit betting and the ranks of hands, against pokerkit: the same moves are allowed, the same seats win as much."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from pokerkit import Automation, NoLimitTexasHoldem, StandardHighHand, State

from coordinator.environments.games import chance
from coordinator.environments.games.no_limit import (
    BIG_BLIND,
    BOARD_CARDS,
    DECK,
    SMALL_BLIND,
    Move,
    NoLimitTable,
    dealt,
    rank,
)

BY_HAND = {
    Automation.CARD_BURNING,
    Automation.HOLE_DEALING,
    Automation.BOARD_DEALING,
    Automation.RUNOUT_COUNT_SELECTION,
}
AUTOMATIC = tuple(each for each in Automation if each not in BY_HAND)
CARDS = st.integers(0, 2**63 - 1).map(lambda seed: chance.shuffled(DECK, "test", seed))
STACKS = st.lists(st.integers(2 * BIG_BLIND, 80), min_size=2, max_size=6)


def theirs(stacks: Sequence[int]) -> State:
    return NoLimitTexasHoldem.create_state(
        AUTOMATIC, True, 0, (SMALL_BLIND, BIG_BLIND), BIG_BLIND, tuple(stacks), len(stacks)
    )


def moves_of(table: NoLimitTable) -> list[Move]:
    """Some of what is allowed: the raises that are as small and as large as may be, and some between."""
    moves = [Move("call")] + [Move("fold")] * table.may_fold
    if table.raise_bounds:
        low, high = table.raise_bounds
        moves += [Move("raise", to) for to in sorted({low, min(low + 1, high), (low + high) // 2, high})]
    return moves


def assert_same(table: NoLimitTable, state: State) -> None:
    """Compare both sides before each move."""
    assert state.actor_index == table.actor
    assert state.can_fold() == table.may_fold
    assert state.checking_or_calling_amount == table.to_call
    bounds = (
        (state.min_completion_betting_or_raising_to_amount, state.max_completion_betting_or_raising_to_amount)
        if state.can_complete_bet_or_raise_to()
        else None
    )
    assert bounds == table.raise_bounds
    assert tuple(state.stacks) == table.stacks
    assert tuple(state.bets) == table.bets


def lay(state: State, cards: Sequence[str], board: Sequence[str], count: int) -> None:
    """Open the board's first cards; one is burnt before each round, from the deck's other end."""
    for number in range(1, len(BOARD_CARDS)):
        if len(list(state.get_board_cards(0))) < BOARD_CARDS[number] <= count:
            state.burn_card(cards[-number])
            state.deal_board("".join(board[BOARD_CARDS[number - 1] : BOARD_CARDS[number]]))


def take(state: State, move: Move) -> None:
    if move.kind == "fold":
        state.fold()
    elif move.kind == "call":
        state.check_or_call()
    else:
        state.complete_bet_or_raise_to(move.to)


@settings(max_examples=60)
@given(CARDS, STACKS, st.data())
def test_a_hand_is_that_of_pokerkit(cards: list[str], stacks: list[int], data: st.DataObject) -> None:
    state, table = theirs(stacks), dealt(stacks)
    holes = [cards[2 * seat : 2 * seat + 2] for seat in range(len(stacks))]
    board = cards[2 * len(stacks) :][:5]
    for hole in holes:
        state.deal_hole("".join(hole))
    while not table.over:
        lay(state, cards, board, BOARD_CARDS[table.round])
        assert_same(table, state)
        move = data.draw(st.sampled_from(moves_of(table)))
        assert table.allows(move)
        take(state, move)
        table = table.after(move)
    if len(table.live) > 1:
        lay(state, cards, board, len(board))
    assert not state.status
    ranks = {seat: rank(holes[seat] + board) for seat in table.live}
    won = table.won(ranks)
    assert sum(won) == 0
    # pokerkit puts pots together that the same hands win, so where hands tie, other seats get the odd chips.
    odd = (len(stacks) - 1) * len(table.pots()) if len(set(ranks.values())) < len(ranks) else 0
    assert all(abs(mine - others) <= odd for mine, others in zip(won, state.payoffs, strict=True))


def played(stacks: Sequence[int], *moves: Move) -> NoLimitTable:
    table = dealt(stacks)
    for move in moves:
        assert table.allows(move)
        table = table.after(move)
    return table


def test_the_odd_chip_goes_to_the_first_of_those_who_split_a_pot() -> None:
    checked = [Move("call")] * 6
    table = played([40, 40, 40], Move("call"), Move("fold"), Move("call"), *checked)
    assert table.over
    assert table.pots() == [(5, (1, 2))]
    assert table.won({1: (0,), 2: (0,)}) == (-1, 1, 0)


def test_who_has_less_wins_of_each_no_more_than_that() -> None:
    table = played([10, 20, 40], Move("raise", 40), Move("call"), Move("call"))
    assert table.pots() == [(30, (0, 1, 2)), (20, (1, 2)), (20, (2,))]
    assert table.won({0: (3,), 1: (2,), 2: (1,)}) == (20, 0, -20)
    assert table.won({0: (3,), 1: (1,), 2: (1,)}) == (20, -10, -10)


def test_an_all_in_for_less_than_a_raise_does_not_let_others_raise_again() -> None:
    table = played([15, 40, 40], Move("raise", 10), Move("raise", 15))
    assert table.raise_bounds == (23, 40)  # seat 1 has not acted yet
    again = table.after(Move("call"))
    assert again.actor == 2
    assert again.raise_bounds is None
    assert not again.allows(Move("raise", 40))


def test_a_first_bet_for_less_than_a_big_blind_lets_those_who_checked_raise() -> None:
    moves = [Move("raise", 4), Move("call"), Move("call"), Move("call"), Move("call"), Move("raise", 1)]
    table = played([40, 40, 5], *moves)
    assert table.actor == 0
    assert table.raise_bounds == (3, 36)


FITTING = [card for card in DECK if card[1] in "hs" or card[0] in "AK"]
"""A part of a deck in which flushes, straights and full houses are common."""


@given(CARDS | st.lists(st.sampled_from(FITTING), min_size=9, max_size=9, unique=True))
def test_ranks_compare_as_those_of_pokerkit(cards: list[str]) -> None:
    board = cards[:5]
    holes = [cards[5:7], cards[7:9]]
    mine, others = (rank(hole + board) for hole in holes)
    theirs_of_mine, theirs_of_others = (StandardHighHand.from_game("".join(hole), "".join(board)) for hole in holes)
    assert (mine > others, mine == others) == (theirs_of_mine > theirs_of_others, theirs_of_mine == theirs_of_others)


def test_every_category_beats_the_one_below() -> None:
    hands = ["2h4h6s8sTd", "2h2s6s8sTd", "2h2s6s6dTd", "2h2s2d8sTd", "Ah2s3d4s5d", "2h4h6h8hTh", "2h2s2d8s8d"]
    hands += ["2h2s2d2c8d", "Ah2h3h4h5h"]
    ranks = [rank([hand[place : place + 2] for place in range(0, 10, 2)]) for hand in hands]
    assert ranks == sorted(ranks)
    assert [worth[0] for worth in ranks] == [*range(9)]
