"""Rules of no-limit hold'em for two to six players: the ranks of hands, the allowed moves, and the chips won.

- A card is a rank and a suit, such as `As` or `Td`. Suits are equal. The best five of up to seven cards have a `Rank`:
  a greater one is better, equal ones tie. Its first number is the category, the others break ties in their order.
- Seats are numbered in the order in which they act after the flop. So seat 0 is the small blind and the last seat the
  button; of two players, seat 0 is the big blind, and the button posts the small one.
- A raise states the new highest bet of its round. It adds at least as much as the last full raise, or is all-in. An
  all-in for less does not let a player who has acted raise again, until such all-ins add up to a full raise.
- The first bet of a round is at least a big blind, or all-in; an all-in then also counts as full.
- A `NoLimitTable` is what all players see; it is a pure function of the moves. Stacks are at least two big blinds.
- Chips are integers. Each pot is split separately; its odd chips go to the first of its winners, one each.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

RANKS: Final = "23456789TJQKA"
SUITS: Final = "cdhs"
DECK: Final = tuple(rank + suit for rank in RANKS for suit in SUITS)

HIGH_CARD, PAIR, TWO_PAIR, THREE, STRAIGHT, FLUSH, FULL_HOUSE, FOUR, STRAIGHT_FLUSH = range(9)

Rank = tuple[int, ...]

_WHEEL = {12, 0, 1, 2, 3}
"""An ace may be the lowest card of a straight."""


def rank(cards: Sequence[str]) -> Rank:
    """Return the rank of the best five of these cards; fewer than five cards have no straight and no flush."""
    ranks = sorted((RANKS.index(card[0]) for card in cards), reverse=True)
    suit, suited = Counter(card[1] for card in cards).most_common(1)[0]
    flush = ranks_of(cards, suit) if suited >= 5 else []
    straight_flush = _straight(flush)
    if straight_flush is not None:
        return STRAIGHT_FLUSH, straight_flush
    often = sorted(((times, each) for each, times in Counter(ranks).items()), reverse=True)
    (most, first), (next_most, second) = often[0], often[1] if len(often) > 1 else (0, -1)
    if most == 4:
        return FOUR, first, *_kickers(ranks, {first}, 1)
    if most == 3 and next_most >= 2:
        return FULL_HOUSE, first, second
    if flush:
        return FLUSH, *flush[:5]
    straight = _straight(ranks)
    if straight is not None:
        return STRAIGHT, straight
    if most == 3:
        return THREE, first, *_kickers(ranks, {first}, 2)
    if most == 2 and next_most == 2:
        return TWO_PAIR, first, second, *_kickers(ranks, {first, second}, 1)
    if most == 2:
        return PAIR, first, *_kickers(ranks, {first}, 3)
    return HIGH_CARD, *ranks[:5]


def ranks_of(cards: Sequence[str], suit: str) -> list[int]:
    """Return the ranks of the cards of a suit, the highest first."""
    return sorted((RANKS.index(card[0]) for card in cards if card[1] == suit), reverse=True)


def _straight(ranks: Collection[int]) -> int | None:
    """Return the highest card of the best straight, or None; the highest of a wheel is its five."""
    held = set(ranks)
    for high in range(12, 3, -1):
        if held >= set(range(high - 4, high + 1)):
            return high
    return 3 if held >= _WHEEL else None


def _kickers(ranks: Sequence[int], used: Collection[int], count: int) -> list[int]:
    return [each for each in ranks if each not in used][:count]


SMALL_BLIND: Final = 1
BIG_BLIND: Final = 2
BOARD_CARDS: Final = (0, 3, 4, 5)
"""Open cards in each of the four rounds."""


class Move(NamedTuple):
    """A player's move; a call of nothing is a check."""

    kind: Literal["fold", "call", "raise"]
    to: int = 0
    """The bet of a raise, which all others must match."""


@dataclass(frozen=True, slots=True)
class NoLimitTable:
    """The public state of a hand, except for the board."""

    stacks: tuple[int, ...]
    """Chips that are not in the pot."""
    paid: tuple[int, ...]
    """Chips that each seat has put into the pot."""
    bets: tuple[int, ...]
    """Chips that each seat has bet in this round."""
    queue: tuple[int, ...]
    """The seats that have still to act in this round, the next one first; empty once the hand is over."""
    faced: tuple[int, ...]
    """The highest bet when a seat last acted in this round, or -1."""
    folded: frozenset[int] = frozenset()
    round: int = 0
    full_raise: int = 0
    """The most that a bet or raise of this round has added: the least that the next adds, if above a big blind."""
    raises: int = 0
    """Raises in this round."""
    history: str = ""
    """All moves in short form; it identifies this table among all that one deal can lead to."""

    @property
    def over(self) -> bool:
        return not self.queue

    @property
    def actor(self) -> int:
        """Return the seat whose turn it is."""
        return self.queue[0]

    @property
    def pot(self) -> int:
        return sum(self.paid)

    @property
    def to_call(self) -> int:
        """Return the chips that the actor must add to stay in; its whole stack if that is less."""
        return min(self.stacks[self.actor], max(self.bets) - self.bets[self.actor])

    @property
    def may_fold(self) -> bool:
        return self.to_call > 0

    @property
    def raise_bounds(self) -> tuple[int, int] | None:
        """Return the lowest and the highest bet that the actor may raise to, or None if it may not raise."""
        seat, highest = self.actor, max(self.bets)
        all_in = self.bets[seat] + self.stacks[seat]
        answerable = any(self.bets[other] + self.stacks[other] > highest for other in self.live if other != seat)
        acted = self.faced[seat] >= 0 and highest - self.faced[seat] < self.full_raise
        if all_in <= highest or not answerable or acted:
            return None
        return min(all_in, highest + max(self.full_raise, BIG_BLIND)), all_in

    @property
    def live(self) -> tuple[int, ...]:
        """Return the seats that have not folded."""
        return tuple(seat for seat in range(len(self.stacks)) if seat not in self.folded)

    def allows(self, move: Move) -> bool:
        """Return True if the actor may make this move."""
        if move.kind == "raise":
            bounds = self.raise_bounds
            return bounds is not None and bounds[0] <= move.to <= bounds[1]
        return move.kind == "call" or self.may_fold

    def after(self, move: Move) -> "NoLimitTable":
        """Return the table after an allowed move of the actor."""
        seat = self.actor
        history = f"{self.history}{move.kind[0]}{move.to or ''}"
        if move.kind == "fold":
            acted = replace(self, folded=self.folded | {seat}, queue=self.queue[1:], history=history)
            return acted._settled()
        highest = max(self.bets)
        chips = self.to_call if move.kind == "call" else move.to - self.bets[seat]
        acted = replace(
            self,
            stacks=_plus(self.stacks, seat, -chips),
            paid=_plus(self.paid, seat, chips),
            bets=_plus(self.bets, seat, chips),
            faced=_put(self.faced, seat, max(highest, move.to)),
            queue=self.queue[1:],
            history=history,
        )
        if move.kind == "raise":
            seats = len(self.stacks)
            others = [(seat + place) % seats for place in range(1, seats)]
            acted = replace(
                acted,
                queue=tuple(other for other in others if other in acted.live and acted.stacks[other]),
                full_raise=max(self.full_raise, move.to - highest),
                raises=self.raises + 1,
            )
        return acted._settled()

    def won(self, ranks: Mapping[int, Rank]) -> tuple[int, ...]:
        """Return the chips that each seat has won, negative if lost; `ranks` are of the seats that did not fold."""
        chips = [-paid for paid in self.paid]
        for amount, seats in self.pots():
            best = max(ranks[seat] for seat in seats) if len(seats) > 1 else None
            winners = [seat for seat in seats if best is None or ranks[seat] == best]
            share, odd = divmod(amount, len(winners))
            for place, seat in enumerate(winners):
                chips[seat] += share + (place < odd)
        return tuple(chips)

    def pots(self) -> Sequence[tuple[int, tuple[int, ...]]]:
        """Return pots as chips and the seats that can win them; an unmatched bet is a pot of its own."""
        pots = list[tuple[int, tuple[int, ...]]]()
        below = 0
        for level in sorted(set(self.paid)):
            amount = (level - below) * sum(paid >= level for paid in self.paid)
            seats = tuple(seat for seat in self.live if self.paid[seat] >= level)
            if pots and pots[-1][1] == seats:
                amount += pots.pop()[0]
            pots.append((amount, seats))
            below = level
        return pots

    def _settled(self) -> "NoLimitTable":
        """Return this table, or, if its round is over, the table of the next round."""
        if len(self.live) == 1:
            return replace(self, queue=())
        if self.queue:
            return self
        can_act = tuple(seat for seat in self.live if self.stacks[seat])
        if self.round == len(BOARD_CARDS) - 1 or len(can_act) < 2:
            return replace(self, queue=())
        none = (0,) * len(self.stacks)
        return replace(
            self,
            bets=none,
            queue=can_act,
            faced=tuple(-1 for _ in none),
            round=self.round + 1,
            full_raise=0,
            raises=0,
            history=f"{self.history}/",
        )


def dealt(stacks: Sequence[int]) -> NoLimitTable:
    """Return a table with the blinds posted."""
    seats = len(stacks)
    big = 0 if seats == 2 else 1
    blinds = tuple(BIG_BLIND if seat == big else SMALL_BLIND if seat == 1 - big else 0 for seat in range(seats))
    left = tuple(stack - blind for stack, blind in zip(stacks, blinds, strict=True))
    queue = tuple((big + place) % seats for place in range(1, seats + 1))
    return NoLimitTable(left, blinds, blinds, queue, (-1,) * seats)


def _plus(values: tuple[int, ...], seat: int, chips: int) -> tuple[int, ...]:
    return _put(values, seat, values[seat] + chips)


def _put(values: tuple[int, ...], seat: int, value: int) -> tuple[int, ...]:
    return (*values[:seat], value, *values[seat + 1 :])
