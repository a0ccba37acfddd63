"""Opponents in no-limit hold'em: what a bot does at a table, by its own cards and a draw of the seed's.

- `random` does anything that is allowed; `caller` never folds and never raises; `rule` plays good hands for value,
  folds bad ones to a bet and now and then bluffs; `aggressive` raises with whatever it holds.
- Nobody raises in a round that saw three raises. So a policy, too, has at most four turns in a round.
- A bot's sizes are shares of the pot, in integers. It never looks at anybody else's cards.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from protocol.tasks import chance
from protocol.tasks.hand_ranks import PAIR, RANKS, rank
from protocol.tasks.no_limit import Move, NoLimitTable

RAISES_MAX = 3
"""In a round, before the bots only call or fold."""

GOOD_START, FAIR_START = 27, 19
"""Points of two cards: AK and pairs from sevens up are good, KJ and small pairs are fair."""

Bot = Callable[[NoLimitTable, Sequence[str], Sequence[str], tuple[object, ...]], Move]
"""Table, own cards, open cards, and the name of its draws."""


def raised(table: NoLimitTable, above: int, below: int) -> Move | None:
    """A raise by that share of the pot as it is after a call, brought into what is allowed."""
    if table.raise_bounds is None:
        return None
    lowest, highest = table.raise_bounds
    wanted = max(table.bets) + (table.pot + table.to_call) * above // below
    return Move("raise", min(max(wanted, lowest), highest))


def points(cards: Sequence[str]) -> int:
    """How good two cards are before the flop."""
    high, low = sorted((RANKS.index(card[0]) + 2 for card in cards), reverse=True)
    if high == low:
        return high + low + 14
    return high + low + 2 * (cards[0][1] == cards[1][1]) - min(high - low - 1, 4)


def strength(cards: Sequence[str], board: Sequence[str]) -> int:
    """2 good, 1 fair, 0 bad: what one's own cards add to the open ones."""
    if not board:
        worth = points(cards)
        return (worth >= GOOD_START) + (worth >= FAIR_START)
    mine, shared = rank([*cards, *board])[0], rank(board)[0]
    return 0 if mine <= shared else 1 if mine == PAIR else 2


def _random(table: NoLimitTable, cards: Sequence[str], board: Sequence[str], name: tuple[object, ...]) -> Move:
    raises = [raised(table, 1, 2), raised(table, 1, 1)] if table.raises < RAISES_MAX else []
    options = [Move("fold")] * table.may_fold + [Move("call")] * 2 + [move for move in raises if move]
    return options[chance.below(len(options), *name)]


def _caller(table: NoLimitTable, cards: Sequence[str], board: Sequence[str], name: tuple[object, ...]) -> Move:
    return Move("call")


def _rule(table: NoLimitTable, cards: Sequence[str], board: Sequence[str], name: tuple[object, ...]) -> Move:
    good = strength(cards, board)
    wanted = raised(table, 2, 3) if table.raises < RAISES_MAX else None
    if wanted and (good == 2 or (not table.may_fold and chance.below(8, *name) == 0)):
        return wanted
    fair_price = 2 * table.to_call <= table.pot
    return Move("call") if good == 2 or not table.may_fold or (good == 1 and fair_price) else Move("fold")


def _aggressive(table: NoLimitTable, cards: Sequence[str], board: Sequence[str], name: tuple[object, ...]) -> Move:
    drawn = chance.below(8, *name)
    wanted = raised(table, 1, 1) if table.raises < RAISES_MAX and drawn < 5 else None
    if wanted:
        return wanted
    return Move("fold") if table.may_fold and not strength(cards, board) and drawn == 7 else Move("call")


BOTS: Final[Mapping[str, Bot]] = {"random": _random, "caller": _caller, "rule": _rule, "aggressive": _aggressive}
