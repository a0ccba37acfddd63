"""Exact answers about Kuhn and Leduc poker: what a strategy can lose to the best opponent, and one that loses little.

- A strategy gives weights to the legal actions in each situation: what one holds, the open card, the history.
- Hands are handled all at once: a value is a vector over the cards of the deck, and what both players hold is kept
  apart only by that no card is dealt twice. So Leduc's 288 situations are walked in a few hundred steps.
- *Exploitability* is the mean of what the best responses to each seat win, in chips per hand: 0 for an equilibrium. The
  uniformly random strategy has 0.458 in Kuhn and 2.374 in Leduc.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from protocol.tasks.betting import BettingRules, BettingTable, strength

Strategy = Callable[[str], Sequence[float] | NDArray[np.float64]]
"""Situation → a weight for each legal action, in the order of `BettingTable.legal`; see `situation`."""

Vector = NDArray[np.float64]
Values = tuple[Vector, Vector]
"""For each player and each card they may hold, what it is worth, weighed by how the opponent came here."""


def situation(card: str, board: str, history: str) -> str:
    """The name of what a player knows: `K:cr`, or `KQ:crc/r` once a card lies open."""
    return f"{card}{board}:{history}"


def situations(rules: BettingRules) -> Iterator[tuple[str, BettingTable]]:
    """Every situation in which somebody has to act, with the table there."""

    def below(table: BettingTable, board: str) -> Iterator[tuple[str, BettingTable]]:
        if table.over:
            return
        for card in rules.ranks:
            if (card + board).count(card) <= rules.suits:
                yield situation(card, board, table.history), table
        for action in table.legal:
            after = table.after(action)
            boards = rules.ranks if after.round > table.round else [board]
            for dealt in boards:
                yield from below(after, dealt)

    return below(BettingTable(rules), "")


def exploitability(rules: BettingRules, strategy: Strategy) -> float:
    """What the best opponent wins of this strategy, on the mean over both seats, in chips per hand."""
    return sum(_Walk(rules, strategy, best=seat).value(seat) for seat in (0, 1)) / 2


def game_value(rules: BettingRules, strategy: Strategy) -> float:
    """What player 0 wins on the mean where both play this strategy."""
    return _Walk(rules, strategy).value(0)


def solve(rules: BettingRules, iterations: int) -> dict[str, list[float]]:
    """A strategy near the equilibrium, by counterfactual regret minimisation (CFR+ with linear averaging)."""
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
    """One pass over the tree of a game, all hands at once."""

    def __init__(
        self, rules: BettingRules, strategy: Strategy, *, best: int | None = None, learner: int | None = None
    ) -> None:
        self._rules, self._strategy, self._best, self._learner = rules, strategy, best, learner
        self.seen: dict[str, tuple[Vector, float]] = {}
        """Of the learner's situations: what each action would have gained, and how likely the learner comes there."""
        deck = rules.deck
        self._apart = 1.0 - np.eye(len(deck))
        """[card, card] 1 where two players can hold them."""
        self._ranks = [[place for place, rank in enumerate(deck) if rank == kind] for kind in rules.ranks]

    def value(self, player: int) -> float:
        """What this player wins on the mean."""
        cards = len(self._rules.deck)
        ones = np.ones(cards)
        found = self._below(BettingTable(self._rules), None, (ones, ones))
        return float(found[player].sum()) / (cards * (cards - 1))

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
        """Lay a card open: each that nobody holds is as likely as the others."""
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
        gains = np.array([[table.won(0, (one, other)) for other in strengths] for one in strengths], float)
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
        """The best action's value for each card; cards of one rank look the same, so they choose together."""
        found = np.zeros(own.shape[1])
        for places in self._ranks:
            found[places] = own[int(own[:, places].sum(1).argmax())][places]
        return found

    def _note(self, table: BettingTable, board: int | None, own: Vector, mixed: Vector, reach: Vector) -> None:
        shown = "" if board is None else self._rules.deck[board]
        for card, places in zip(self._rules.ranks, self._ranks, strict=True):
            if (card + shown).count(card) <= self._rules.suits:
                name = situation(card, shown, table.history)
                gains, came = (own - mixed)[:, places].sum(1), float(reach[places].max())
                before = self.seen.get(name)
                self.seen[name] = (gains + before[0], came) if before else (gains, came)
