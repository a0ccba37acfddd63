"""Ranks of poker hands: the best five of up to seven cards, as a value that can be compared.

- A card is a rank and a suit, such as `As` or `Td`. Suits are equal.
- A greater rank is better, equal ranks tie. The first number is the category, the others break ties in their order.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Final

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
