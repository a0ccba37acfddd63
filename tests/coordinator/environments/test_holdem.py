"""Hold'em hands: what turns mean, what they earn, and that seed and words decide everything."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.environments.games import chance
from coordinator.environments.games.holdem import BOTS, OPPONENTS, RAISES_MAX, Hand, Holdem
from coordinator.environments.games.no_limit import BIG_BLIND, DECK, Move, dealt, rank

SEEDS = st.integers(0, 2**63 - 1)
GAMES = st.builds(Holdem, opponent=st.sampled_from(OPPONENTS), players=st.integers(2, 6), stack=st.integers(2, 200))
SAID = st.one_of(
    st.sampled_from(["fold", "call", "check", "raise", "raise min", "raise half", "bet pot", "all in", "ALL-IN "]),
    st.sampled_from(["raise to 9", "raise 2/3", "raise 75% pot"]),
    st.integers(0, 500).map("raise {}".format),
    st.text(max_size=24),
)
NO_ACTIONS = (
    *(
        "",
        "raise 3",
        "raise 41",
        "raise 0",
        "raise -4",
        "raise 4.5",
        "raise ４",
        "raise 1/0",
        "raise 0%",
        "raise 99999",
    ),
    *("raise  4", "raise 4 4", "call fold", "all", "ｆold", "f", "\x00", "fold" * 10, "raise " + "9" * 5000),
)


def buttons(count: int, **parameters: int | str) -> list[Hand]:
    """So many hands before the flop, of two players, in which the policy has the button."""
    hands = (Holdem(**parameters).reset(seed) for seed in range(100))  # type: ignore[arg-type]  # as given
    return [hand for hand in hands if hand._seat == 1][:count]


@given(GAMES, SEEDS, st.lists(SAID, max_size=40))
def test_a_hand_ends_and_nobody_wins_or_loses_more_than_there_is(game: Holdem, seed: int, said: list[str]) -> None:
    hand, again = game.reset(seed), game.reset(seed)
    assert hand.opening == again.opening
    for turn in [*said, *["call"] * 16]:  # by four turns in each of four rounds any hand is over
        read = hand.step(turn)
        assert read == again.step(turn)
        if read is None:
            break
        assert read.endswith("\n>")
        assert hand.table.raises <= RAISES_MAX + 1
    else:
        raise AssertionError(hand.table.history)
    reward = hand.reward()
    assert reward == again.reward()
    assert hand.table.over or reward.status == "invalid"
    assert -game.stack <= reward.components["blinds"] <= game.stack * (game.players - 1)
    assert reward.score == reward.components["blinds"] - (reward.status == "invalid")


@given(GAMES, SEEDS)
def test_whoever_knows_the_words_speaks_them_to_the_end(game: Holdem, seed: int) -> None:
    hand = game.reset(seed)
    *turns, last = game.demonstration(seed)
    assert all(hand.step(turn) is not None for turn in turns)
    assert hand.step(last) is None
    assert hand.reward().status == "ok"


@pytest.mark.parametrize(
    ("said", "to"),
    [
        ("raise", 4),
        ("bet min", 4),
        ("raise 4", 4),
        ("raise to 17", 17),
        (" RAISE\n", 4),
        ("raise half", 4),  # half of a pot of 4 makes it 4
        ("raise pot", 6),
        ("raise 1/2 pot", 4),
        ("raise 3/2", 8),
        ("raise 200%", 10),
        ("raise 1%", 4),  # a share below the least raise is the least raise
        ("raise 999%", 40),  # one above all chips is all chips
        ("all in", 40),
        ("raise 40", 40),
    ],
)
def test_a_raise_is_told_by_chips_or_by_a_share_of_the_pot(said: str, to: int) -> None:
    (hand,) = buttons(1, stack=20)
    assert hand.meant(said) == Move("raise", to)


@pytest.mark.parametrize("said", NO_ACTIONS)
def test_what_is_no_action_costs_a_blind_more_than_to_fold(said: str) -> None:
    for hand in buttons(3, stack=20):
        assert hand.step(said) is None
        assert hand.reward().status == "invalid"
        assert hand.reward().score == -0.5 - 1
        assert hand.step("call") is None
        assert hand.reward().status == "invalid"


def test_to_fold_where_there_is_nothing_to_call_is_illegal() -> None:
    hands = (Holdem(opponent="caller").reset(seed) for seed in range(20))
    big_blind = next(hand for hand in hands if hand._seat == 0)
    assert "they call\npot 4 call 0" in big_blind.opening
    assert big_blind.step("fold") is None
    assert big_blind.reward().status == "invalid"


@given(GAMES, SEEDS)
def test_there_is_always_something_to_do(game: Holdem, seed: int) -> None:
    """Opponents who would all have folded before the policy's first turn."""
    hand = game.reset(seed)
    assert not hand.table.over
    assert hand.table.actor == hand._seat
    assert hand.opening.endswith("\n>")


def test_all_in_where_one_cannot_raise_is_a_call() -> None:
    """A call against another who is all in already."""
    hands = (Holdem(opponent="aggressive", stack=2).reset(seed) for seed in range(100))
    hand = next(hand for hand in hands if hand.table.raise_bounds is None)
    assert hand.meant("raise") is None
    assert hand.meant("all in") == Move("call")


def test_a_hand_that_was_cut_off_is_given_up() -> None:
    (hand,) = buttons(1, opponent="caller")
    hand.step("raise 10")
    assert hand.reward().score == -10 / BIG_BLIND
    assert hand.reward().status == "ok"


def test_samples_of_a_group_would_see_the_same_board() -> None:
    quiet, loud = (buttons(1, opponent="caller")[0] for _ in range(2))
    boards = list[list[str]]()
    for hand, turn in ((quiet, "call"), (loud, "raise half")):
        lines = list[str]()
        while said := hand.step(turn):
            lines += said.splitlines()
        boards.append([line for line in lines if line.split()[0] in ("flop", "turn", "river")])
    assert boards[0] == boards[1]
    assert len(boards[0]) == 3


@pytest.mark.parametrize("name", BOTS)
@given(seed=SEEDS, seats=st.integers(2, 6), stack=st.integers(4, 60))
def test_bots_only_do_what_is_allowed(name: str, seed: int, seats: int, stack: int) -> None:
    cards, table = chance.shuffled(DECK, "test", seed), dealt([stack] * seats)
    while not table.over:
        board = cards[-(0, 3, 4, 5)[table.round] :] if table.round else []
        own = cards[2 * table.actor : 2 * table.actor + 2]
        move = BOTS[name](table, own, board, ("test", seed, table.history))
        assert table.allows(move)
        assert move == BOTS[name](table, own, board, ("test", seed, table.history))
        table = table.after(move)


def test_better_players_win_of_worse_ones() -> None:
    """Chips of bots against each other, over so many hands that luck cannot explain them."""
    chips = {"rule": 0, "random": 0}
    for seed in range(400):
        for first_one in (0, 1):  # each deal from both sides
            seats = ["rule", "random"] if not first_one else ["random", "rule"]
            cards, table = chance.shuffled(DECK, "match", seed), dealt([40, 40])
            while not table.over:
                board = cards[4 : 4 + (0, 3, 4, 5)[table.round]]
                own = cards[2 * table.actor : 2 * table.actor + 2]
                table = table.after(BOTS[seats[table.actor]](table, own, board, ("match", seed, table.history)))
            won = table.won({seat: rank([*cards[2 * seat : 2 * seat + 2], *cards[4:9]]) for seat in table.live})
            for seat, name in enumerate(seats):
                chips[name] += won[seat]
    assert chips["rule"] > 800  # a chip, which is half a big blind, in each hand
    assert chips["random"] == -chips["rule"]


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"players": 1}, "players"),
        ({"players": 7}, "players"),
        ({"stack": 1}, "stack"),
        ({"stack": 201}, "stack"),
        ({"opponent": "cfr"}, "opponent"),
        ({"rules": 2}, "rules"),
    ],
)
def test_parameters_have_bounds(parameters: dict[str, int | str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Holdem(**parameters)  # type: ignore[arg-type]  # as given
