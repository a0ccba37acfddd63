"""Texas hold'em without a limit, as an environment: one hand against seeded opponents, judged by the big blinds won.

    hold As Kd, seat 2 of 2       the policy's cards; the last seat is the button
    they raise 6                  an opponent's action; `p3 raise 6` if there are several
    flop 7h 8h 2c                 then `turn` and `river`
    pot 8 call 4 have 198         chips in the middle, to call, and left; blinds are 1 and 2
    >                             the policy's turn

- A turn is `fold`, `call` (or `check`), `all in`, or a raise: `raise 12` raises to 12 in this round, `raise half`,
  `raise pot`, `raise 2/3` and `raise 75%` raise by a share of the pot after a call, `raise` and `raise min` by the
  least that is allowed. Shares are clamped to the allowed range, numbers must be in it. `bet` is a raise.
- A text without an action, or with one that is not allowed, ends the hand as a fold and costs one more big blind: so it
  is never the best choice.
- The seed deals the cards, chooses the seat and the opponents, and draws for them. So all samples of a group hold the
  same cards, in the same seat, and would see the same board.
- There is always a first turn: an opponent whose fold would end the hand before it calls instead.
- Opponents do not look at the policy's cards.

Opponents are bots, which play by their own cards and a draw of the seed's:

- `random` does anything that is allowed; `caller` never folds and never raises; `rule` plays good hands for value,
  folds bad ones to a bet and now and then bluffs; `aggressive` raises with whatever it holds.
- No bot raises in a round after three raises. So a policy has at most four turns in a round.
- A bot's raises are shares of the pot, in integers. It never sees another player's cards.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from coordinator.environments.games import chance
from coordinator.environments.games.no_limit import (
    BIG_BLIND,
    BOARD_CARDS,
    DECK,
    PAIR,
    RANKS,
    SMALL_BLIND,
    SUITS,
    Move,
    NoLimitTable,
    dealt,
    rank,
)
from protocol.tasks import Reward

RAISES_MAX = 3
"""Raises in a round, after which the bots only call or fold."""

GOOD_START, FAIR_START = 27, 19
"""Least points of two good or fair cards: AK and pairs from sevens up are good, KJ and small pairs are fair."""

Bot = Callable[[NoLimitTable, Sequence[str], Sequence[str], tuple[object, ...]], Move]
"""A function of the table, its own cards, the open cards, and the name of its draws."""


def raised(table: NoLimitTable, above: int, below: int) -> Move | None:
    """Return a raise by `above` / `below` of the pot after a call, clamped to what is allowed; None if no raise is."""
    if table.raise_bounds is None:
        return None
    lowest, highest = table.raise_bounds
    wanted = max(table.bets) + (table.pot + table.to_call) * above // below
    return Move("raise", min(max(wanted, lowest), highest))


def points(cards: Sequence[str]) -> int:
    """Return the points of two cards before the flop."""
    high, low = sorted((RANKS.index(card[0]) + 2 for card in cards), reverse=True)
    if high == low:
        return high + low + 14
    return high + low + 2 * (cards[0][1] == cards[1][1]) - min(high - low - 1, 4)


def strength(cards: Sequence[str], board: Sequence[str]) -> int:
    """Rate what a player's own cards add to the open ones: 2 good, 1 fair, 0 bad."""
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


OPPONENTS: Final = (*BOTS, "mixed")
STREETS: Final = ("flop", "turn", "river")

ACTION_MAX_CHARS = 20
"""Longer turns are invalid and are not parsed."""

ILLEGAL_COSTS = 1.0
"""The cost of an illegal turn, in big blinds."""

DEMONSTRATED: Final = ("call", "call", "call", "fold", "raise half", "raise pot", "all in")

_PLAIN: Final = {"fold": Move("fold"), "call": Move("call"), "check": Move("call")}
_SHARES: Final = {"half": (1, 2), "pot": (1, 1)}
_RAISE: Final = re.compile(
    r"(?:raise|bet)(?: to)?(?: (?:(?P<to>\d{1,5})|(?P<share>half|pot)(?: pot)?|(?P<above>[1-9]\d?)/(?P<below>[1-9]\d?)"
    r"(?: pot)?|(?P<percent>[1-9]\d{0,2})%(?: pot)?|min))?",
    re.ASCII,
)

_SPOKEN: Final = ("hold", "they", "fold", "call", "check", "raise", "half", "pot", "all", "seat", "of", "have")

_EXPLAINED = (
    "No-limit Texas hold'em, {players} players with {chips} chips each, blinds {small} and {big}. Win as many chips as "
    "you can. Say one of: fold, call, check, raise N (to N chips in this round), raise half, raise pot, all in.\n"
)


@dataclass(frozen=True, slots=True)
class Holdem:
    """Texas hold'em without a limit, at a table of `players`, with stacks of `stack` big blinds."""

    opponent: str = "mixed"
    """random, caller, rule, aggressive, or mixed: the seed chooses one of these for each seat."""
    players: int = 2
    stack: int = 100
    rules: int = 0
    distinct: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.opponent not in OPPONENTS:
            raise ValueError(f"opponent is one of {', '.join(OPPONENTS)}")
        for name, (low, high) in {"players": (2, 6), "stack": (2, 200), "rules": (0, 1)}.items():
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} is between {low} and {high}")

    @property
    def words(self) -> tuple[str, ...]:
        spaced = (f" {word}" for word in (*_SPOKEN, "in", *RANKS))
        return (*_SPOKEN, *spaced, *STREETS, *SUITS, ",", "\n", ">")

    def reset(self, seed: int) -> "Hand":
        return Hand(self, seed)

    def demonstration(self, seed: int) -> tuple[str, ...]:
        """Return the turns of a player that chooses any allowed action."""
        hand, turns = self.reset(seed), list[str]()
        while not hand.table.over:
            allowed = [text for text in DEMONSTRATED if hand.meant(text)]
            turns.append(allowed[chance.below(len(allowed), "demonstration", seed, len(turns))])
            hand.step(turns[-1])
        return tuple(turns)

    def explained(self) -> str:
        if not self.rules:
            return ""
        chips = self.stack * BIG_BLIND
        return _EXPLAINED.format(players=self.players, chips=chips, small=SMALL_BLIND, big=BIG_BLIND)


class Hand:
    """A hand in progress."""

    def __init__(self, game: Holdem, seed: int) -> None:
        self._seed, seats = seed, range(game.players)
        cards = chance.shuffled(DECK, "holdem", seed, "deal")
        self._cards = [cards[2 * seat : 2 * seat + 2] for seat in seats]
        self._board = cards[2 * game.players :][: BOARD_CARDS[-1]]
        self._seat = chance.below(game.players, "holdem", seed, "seat")
        known = sorted(BOTS)
        self._bots = [
            BOTS[known[chance.below(len(known), "holdem", seed, "bot", seat)]]
            if game.opponent == "mixed"
            else BOTS[game.opponent]
            for seat in seats
        ]
        self._illegal = self._spoken = False
        self.table = dealt([game.stack * BIG_BLIND] * game.players)
        hold = f"hold {' '.join(self._cards[self._seat])}, seat {self._seat + 1} of {game.players}\n"
        self._opening = f"{game.explained()}{hold}{self._wait()}"

    @property
    def opening(self) -> str:
        return self._opening

    def meant(self, action: str) -> Move | None:
        """Return the move that a turn's text means, or None if it means none that is allowed."""
        text = action.strip().lower() if len(action) <= ACTION_MAX_CHARS else ""
        move = _PLAIN[text] if text in _PLAIN else self._raise(text)
        return move if move is not None and self.table.allows(move) else None

    def step(self, action: str) -> str | None:
        if self._ended:
            return None
        move = self.meant(action)
        if move is None:
            self._illegal = True
            return None
        self._spoken = True
        said = self._act(move) + self._wait()
        return None if self.table.over else said

    def reward(self) -> Reward:
        shown = self.table.over and len(self.table.live) > 1 and self._seat in self.table.live
        chips = self._won() if self.table.over else -self.table.paid[self._seat]
        won = chips / BIG_BLIND
        components = {"blinds": won, "legal": float(not self._illegal), "showdown": float(shown)}
        return Reward(won - ILLEGAL_COSTS * self._illegal, "invalid" if self._illegal else "ok", components)

    @property
    def _ended(self) -> bool:
        return self._illegal or self.table.over

    def _won(self) -> int:
        ranks = {seat: rank([*self._cards[seat], *self._board]) for seat in self.table.live}
        return self.table.won(ranks)[self._seat]

    def _raise(self, text: str) -> Move | None:
        if text in ("all in", "all-in", "allin"):
            return Move("raise", self.table.raise_bounds[1]) if self.table.raise_bounds else Move("call")
        said = _RAISE.fullmatch(text)
        if not said:
            return None
        if said["to"]:
            return Move("raise", int(said["to"]))
        if said["share"]:
            return raised(self.table, *_SHARES[said["share"]])
        if said["above"]:
            return raised(self.table, int(said["above"]), int(said["below"]))
        return raised(self.table, int(said["percent"] or 0), 100)

    def _wait(self) -> str:
        """Let opponents act until it is the policy's turn or the hand is over; return the text about it."""
        said = ""
        while not self.table.over and self.table.actor != self._seat:
            seat = self.table.actor
            name = ("holdem", self._seed, "act", seat, self.table.history)
            move = self._bots[seat](self.table, self._cards[seat], self._open(self.table.round), name)
            if self.table.after(move).over and not self._spoken:
                move = Move("call")
            said += self._line_about(seat, move) + self._act(move)
        if self.table.over:
            return said
        return f"{said}pot {self.table.pot} call {self.table.to_call} have {self.table.stacks[self._seat]}\n>"

    def _line_about(self, seat: int, move: Move) -> str:
        who = "they" if len(self._cards) == 2 else f"p{seat + 1}"
        if move.kind == "raise":
            return f"{who} raise {move.to}\n"
        return f"{who} {move.kind if move.kind == 'fold' or self.table.to_call else 'check'}\n"

    def _act(self, move: Move) -> str:
        """Apply a move; return the text with the new open cards if it ended a round."""
        before, self.table = self.table.round, self.table.after(move)
        if self.table.over or self.table.round == before:
            return ""
        first, last = BOARD_CARDS[before], BOARD_CARDS[before + 1]
        return f"{STREETS[before]} {' '.join(self._board[first:last])}\n"

    def _open(self, number: int) -> list[str]:
        return self._board[: BOARD_CARDS[number]]
