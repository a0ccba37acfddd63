"""Rules of the smallest two-player limit poker games, Kuhn and Leduc: the legal actions and the winner.

- A deck has one or two suits of a few ranks. Each player puts in one chip and holds one card; in Leduc an open card is
  dealt between the two rounds of betting.
- The actions are letters: `f` folds, which is legal only if there is something to call, `c` calls or checks, `r` raises
  by the round's fixed size. A history is the actions in their order, with `/` between rounds.
- A `BettingTable` is what all players see; it is a pure function of the history. Player 0 begins each round.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True, slots=True)
class BettingRules:
    """The parameters of a game."""

    name: str
    ranks: str
    """The lowest rank first."""
    suits: int
    raises: tuple[int, ...]
    """The size of a raise in chips, for each round."""
    raises_max: int
    """Raises in one round, by both players together."""

    @property
    def deck(self) -> str:
        """The rank of every card."""
        return self.ranks * self.suits


KUHN: Final = BettingRules("kuhn", ranks="JQK", suits=1, raises=(1,), raises_max=1)
LEDUC: Final = BettingRules("leduc", ranks="JQK", suits=2, raises=(2, 4), raises_max=2)


@dataclass(frozen=True, slots=True)
class BettingTable:
    """The public state of a hand, except for the open card."""

    rules: BettingRules
    history: str = ""
    stakes: tuple[int, int] = (1, 1)
    actor: int = 0
    round: int = 0
    raises: int = 0
    checked: bool = False
    """True if the other player has acted in this round."""
    folded: int | None = None
    over: bool = False

    @property
    def legal(self) -> str:
        """Return the actor's legal actions."""
        facing = self.stakes[self.actor] < self.stakes[1 - self.actor]
        return "f" * facing + "c" + "r" * (self.raises < self.rules.raises_max)

    def after(self, action: str) -> "BettingTable":
        """Return the table after a legal action of the actor."""
        history = self.history + action
        other = 1 - self.actor
        if action == "f":
            return replace(self, history=history, folded=self.actor, over=True)
        high = max(self.stakes)
        if action == "r":
            stakes = _with(self.stakes, self.actor, high + self.rules.raises[self.round])
            return replace(self, history=history, stakes=stakes, actor=other, raises=self.raises + 1, checked=True)
        called = replace(self, history=history, stakes=_with(self.stakes, self.actor, high), actor=other, checked=True)
        if not self.checked:
            return called
        if self.round + 1 == len(self.rules.raises):
            return replace(called, over=True)
        return replace(called, history=history + "/", actor=0, round=self.round + 1, raises=0, checked=False)

    def won(self, player: int, strengths: tuple[int, int]) -> int:
        """Return the chips that a player has won at the end; negative if lost."""
        if self.folded is not None:
            return self.stakes[self.folded] * (-1 if self.folded == player else 1)
        mine, others = strengths[player], strengths[1 - player]
        return self.stakes[player] * ((mine > others) - (mine < others))


def strength(rules: BettingRules, card: str, board: str) -> int:
    """Return the strength of a card at the end: a pair with the open card beats everything."""
    return len(rules.ranks) if card == board else rules.ranks.index(card)


def _with(stakes: tuple[int, int], player: int, chips: int) -> tuple[int, int]:
    return (chips, stakes[1]) if player == 0 else (stakes[0], chips)


def situation(card: str, board: str, history: str) -> str:
    """Return the name of a player's knowledge: `K:cr`, or `KQ:crc/r` once a card is open."""
    return f"{card}{board}:{history}"


def situations(rules: BettingRules) -> Iterator[tuple[str, BettingTable]]:
    """Yield every situation in which a player has to act, with its table."""

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
