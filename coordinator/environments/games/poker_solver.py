"""Exact values of Kuhn and Leduc poker: the exploitability of a strategy, and strategies near the equilibrium.

- A strategy gives weights to the legal actions in each situation: the own card, the open card, the history.
- All hands are computed at once: a value is a vector over the cards of the deck, and the only link between the players'
  cards is that no card is dealt twice. So Leduc's 288 situations take a few hundred steps.
- *Exploitability* is the mean win of the best responses to each seat, in chips per hand: 0 for an equilibrium. The
  uniformly random strategy has 0.458 in Kuhn and 2.374 in Leduc.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from coordinator.environments.games.betting import BettingRules, BettingTable, situation, situations, strength

Strategy = Callable[[str], Sequence[float] | NDArray[np.float64]]
"""Situation → a weight for each legal action, in the order of `BettingTable.legal`; see `betting.situation`."""

Vector = NDArray[np.float64]
Values = tuple[Vector, Vector]
"""The value of each card for each player, weighted by the opponent's probability of reaching this table."""


def exploitability(rules: BettingRules, strategy: Strategy) -> float:
    """Return the mean win of the best opponent against this strategy over both seats, in chips per hand."""
    return sum(_Walk(rules, strategy, best=seat).value(seat) for seat in (0, 1)) / 2


def game_value(rules: BettingRules, strategy: Strategy) -> float:
    """Return the mean win of player 0 if both play this strategy, in chips per hand."""
    return _Walk(rules, strategy).value(0)


def solve(rules: BettingRules, iterations: int) -> dict[str, list[float]]:
    """Compute a strategy near the equilibrium by counterfactual regret minimisation (CFR+ with linear averaging)."""
    regrets: dict[str, Vector] = {}
    totals: dict[str, Vector] = {}
    places = {name: len(table.legal) for name, table in situations(rules)}
    for name, count in places.items():
        regrets[name], totals[name] = np.zeros(count), np.zeros(count)
    current = {name: np.full(count, 1 / count) for name, count in places.items()}
    for turn in range(1, iterations + 1):
        for player in (0, 1):
            walk = _Walk(rules, current.__getitem__, learner=player)
            walk.value(player)
            for name, (gains, reach) in walk.seen.items():
                regrets[name] = np.maximum(regrets[name] + gains, 0.0)
                totals[name] += turn * reach * current[name]
            for name in walk.seen:
                total = regrets[name].sum()
                current[name] = regrets[name] / total if total > 0 else np.full(places[name], 1 / places[name])
    return {name: list(total / total.sum()) if total.sum() else [1.0] * len(total) for name, total in totals.items()}


class _Walk:
    """A pass over the tree of a game, for all hands at once."""

    def __init__(
        self, rules: BettingRules, strategy: Strategy, *, best: int | None = None, learner: int | None = None
    ) -> None:
        self._rules, self._strategy, self._best, self._learner = rules, strategy, best, learner
        self.seen: dict[str, tuple[Vector, float]] = {}
        """The learner's situations: the gain of each action, and the learner's probability of reaching it."""
        deck = rules.deck
        self._apart = 1.0 - np.eye(len(deck))
        """Matrix [card, card]: 1 if two players can hold these cards."""
        self._ranks = [[place for place, rank in enumerate(deck) if rank == kind] for kind in rules.ranks]

    def value(self, player: int) -> float:
        """Return the mean win of this player."""
        cards = len(self._rules.deck)
        ones = np.ones(cards)
        values = self._below(BettingTable(self._rules), None, (ones, ones))
        return float(values[player].sum()) / (cards * (cards - 1))

    def _below(self, table: BettingTable, board: int | None, reach: Values) -> Values:
        if table.over:
            return self._end(table, board, reach)
        weights = self._weights(table, board)  # [card, action]
        actor, legal = table.actor, table.legal
        branches = []
        for number, action in enumerate(legal):
            mine = reach[actor] * weights[:, number] if actor != self._best else reach[actor]
            both = (mine, reach[1]) if actor == 0 else (reach[0], mine)
            after = table.after(action)
            branches.append(self._deal(after, both) if after.round > table.round else self._below(after, board, both))
        own = np.stack([branch[actor] for branch in branches])  # [action, card]
        others = np.sum([branch[1 - actor] for branch in branches], axis=0)
        mixed = self._best_of(own) if actor == self._best else (own * weights.T).sum(0)
        if actor == self._learner:
            self._note(table, board, own, mixed, reach[actor])
        return (mixed, others) if actor == 0 else (others, mixed)

    def _deal(self, table: BettingTable, reach: Values) -> Values:
        """Deal the open card: every card that no player holds is equally likely."""
        cards = len(self._rules.deck)
        total = [np.zeros(cards), np.zeros(cards)]
        for board in range(cards):
            free = np.ones(cards)
            free[board] = 0.0
            for place, part in enumerate(self._below(table, board, (reach[0] * free, reach[1] * free))):
                total[place] += part * free / (cards - 2)
        return total[0], total[1]

    def _end(self, table: BettingTable, board: int | None, reach: Values) -> Values:
        rules, deck = self._rules, self._rules.deck
        shown = "" if board is None else deck[board]
        strengths = [strength(rules, card, shown) for card in deck]
        gains = np.array([[table.won(0, (own, other)) for other in strengths] for own in strengths], float)
        gains *= self._apart
        return gains @ reach[1], -(gains.T @ reach[0])

    def _weights(self, table: BettingTable, board: int | None) -> Vector:
        shown = "" if board is None else self._rules.deck[board]
        rows = np.zeros((len(self._rules.deck), len(table.legal)))
        for card, places in zip(self._rules.ranks, self._ranks, strict=True):
            if (card + shown).count(card) <= self._rules.suits:
                weights = np.asarray(self._strategy(situation(card, shown, table.history)), float)
                rows[places] = weights / weights.sum()
        return rows

    def _best_of(self, own: Vector) -> Vector:
        """Return the best action's value for each card; cards of the same rank share one action."""
        best = np.zeros(own.shape[1])
        for places in self._ranks:
            best[places] = own[int(own[:, places].sum(1).argmax())][places]
        return best

    def _note(self, table: BettingTable, board: int | None, own: Vector, mixed: Vector, reach: Vector) -> None:
        shown = "" if board is None else self._rules.deck[board]
        for card, places in zip(self._rules.ranks, self._ranks, strict=True):
            if (card + shown).count(card) <= self._rules.suits:
                name = situation(card, shown, table.history)
                gains, came = (own - mixed)[:, places].sum(1), float(reach[places].max())
                before = self.seen.get(name)
                self.seen[name] = (gains + before[0], came) if before else (gains, came)
