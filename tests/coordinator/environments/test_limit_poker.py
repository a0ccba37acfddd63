"""Kuhn and Leduc poker: the rules and the exact exploitability against open_spiel, the hands against the rules."""

from collections.abc import Callable
from typing import Any

import pyspiel
import pytest
from hypothesis import given
from hypothesis import strategies as st
from open_spiel.python import policy as policies
from open_spiel.python.algorithms import exploitability as reference

from coordinator.environments.games import chance
from coordinator.environments.games.betting import KUHN, LEDUC, BettingRules, BettingTable, situation, situations
from coordinator.environments.games.exploitability import exploitability
from coordinator.environments.games.limit_poker import (
    OPPONENTS,
    SPOKEN,
    Kuhn,
    Leduc,
    near_equilibrium,
    transcript,
    weights_of,
)

GAMES = pytest.mark.parametrize("rules", [KUHN, LEDUC], ids=lambda rules: rules.name)


def even(_: str, count: int) -> list[float]:
    return [1.0] * count


def uneven(name: str, count: int) -> list[float]:
    """Some strategy, without zeros, that no symmetry is left in."""
    return [1.0 + (sum(map(ord, name)) * (place + 3)) % 7 for place in range(count)]


def theirs(rules: BettingRules, weights: Callable[[str, int], list[float]]) -> Any:
    """Return the strategy as open_spiel has it."""
    game = pyspiel.load_game(f"{rules.name}_poker")
    tabular = policies.TabularPolicy(game)
    for state in tabular.states:
        player, actions = state.current_player(), state.legal_actions()
        name, legal = named(rules, state, player)
        row = tabular.policy_for_key(state.information_state_string(player))
        row[:] = 0.0
        mine = weights(name, len(legal))
        for letter, weight in zip(legal, mine, strict=True):
            row[action_of(rules, letter, legal, actions)] = weight / sum(mine)
    return game, tabular


def action_of(rules: BettingRules, letter: str, legal: str, actions: list[int]) -> int:
    """Kuhn's two actions are pass and bet; Leduc's are fold, call, raise."""
    return actions[legal.index(letter)] if rules is KUHN else "fcr".index(letter)


def named(rules: BettingRules, state: Any, player: int) -> tuple[str, str]:
    """Return our name of a situation of open_spiel's, and what is legal there, replayed from its history."""
    table, cards, board = BettingTable(rules), list[str](), ""
    for action in state.history():
        if len(cards) < 2:
            cards.append(rules.ranks[action // rules.suits])
        elif table.round and not board:
            board = rules.ranks[action // rules.suits]
        elif rules is KUHN:
            table = table.after(table.legal[action])
        else:
            table = table.after("fcr"[action])
    return situation(cards[player], board, table.history), table.legal


@GAMES
def test_exploitability_is_that_of_open_spiel(rules: BettingRules) -> None:
    counts = {name: len(table.legal) for name, table in situations(rules)}
    for weights in (even, uneven):
        game, tabular = theirs(rules, weights)
        table = {name: weights(name, count) for name, count in counts.items()}
        mine = exploitability(rules, table.__getitem__)
        assert mine == pytest.approx(reference.exploitability(game, tabular), abs=1e-12)


@GAMES
def test_the_frozen_strategy_is_near_the_equilibrium(rules: BettingRules) -> None:
    frozen = near_equilibrium(rules)
    assert {name: len(weights) for name, weights in frozen.items()} == {
        name: len(table.legal) for name, table in situations(rules)
    }
    assert exploitability(rules, frozen.__getitem__) < 0.005


@GAMES
def test_a_situation_is_reached_by_its_transcript(rules: BettingRules) -> None:
    """The prompt of an evaluation is what the policy would have read in a hand."""
    hands = {"kuhn": Kuhn(opponent="random"), "leduc": Leduc(opponent="random")}[rules.name]
    wanted = {name for name, _ in situations(rules)}
    met = set[str]()
    for seed in range(2_000):
        hand, turns = hands.reset(seed), list[tuple[str, str]]()
        opening = hand.opening
        while not hand.table.over:
            card, board = hand._cards[hand._seat], hand._board
            name = situation(card, board, hand.table.history)
            assert transcript(card, board, hand.table.history, hand._seat, rules) == (opening, turns)
            met.add(name)
            letter = hand.table.legal[chance.below(len(hand.table.legal), "test", seed, len(turns))]
            said = hand.step(SPOKEN[letter])
            turns.append((SPOKEN[letter], said or ""))
    assert met <= wanted
    assert len(met) > 0.8 * len(wanted)


@GAMES
def test_opponents_only_do_what_is_legal(rules: BettingRules) -> None:
    for name, table in situations(rules):
        known = name.partition(":")[0]
        for opponent in OPPONENTS[:-1]:
            weights = weights_of(opponent, rules, known[0], known[1:], table)
            assert len(weights) == len(table.legal)
            assert sum(weights) > 0


@given(st.integers(0, 2**63 - 1), st.sampled_from(["fold", "call", "raise"]), st.sampled_from(OPPONENTS))
def test_chips_are_won_from_each_other(seed: int, action: str, opponent: str) -> None:
    """A hand ends, whatever one says again and again, and nobody wins or loses more than is on the table."""
    hand = Leduc(opponent=opponent).reset(seed)
    for _ in range(10):
        if hand.step(action) is None:
            break
    reward = hand.reward()
    assert hand.table.over or reward.status == "invalid"
    assert reward.components["chips"] in {*range(-13, 14)}
    assert reward.score == reward.components["chips"] - (reward.status == "invalid")


@pytest.mark.parametrize("said", ["", "fold" * 10, "all in", "\x00", "foldcall", "call raise", "ｆold", "f"])
def test_what_is_no_action_costs_more_than_to_fold(said: str) -> None:
    for seed in range(20):
        hand = Leduc().reset(seed)
        folded = -hand.table.stakes[hand._seat]
        assert hand.step(said) is None
        assert hand.reward().score == folded - 1
        assert hand.reward().status == "invalid"


def test_to_fold_where_there_is_nothing_to_call_is_illegal() -> None:
    hand = next(hand for hand in map(Kuhn().reset, range(100)) if hand.table.history == "")
    assert hand.step("fold") is None
    assert hand.reward().status == "invalid"


def test_a_hand_that_was_cut_off_is_given_up() -> None:
    hand = Leduc(opponent="rule").reset(5)
    assert hand.reward().score == -hand.table.stakes[hand._seat]
