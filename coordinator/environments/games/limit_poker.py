"""Kuhn and Leduc poker as environments: one hand against a seeded opponent, judged by the chips won.

    hold K            the policy's card; read once
    they raise        the opponent's action
    board Q           the open card
    >                 the policy's turn: fold, call, check or raise

- The seed deals the cards, chooses who begins, and draws for the opponent. So all samples of a group hold the same
  card.
- An opponent's draws depend on the policy's earlier actions, but never on its card.
- `check` is a call with nothing to call. A text without an action, or with one that is not allowed, ends the hand as a
  fold and costs one more chip: so it is never the best choice.
- The parameter `rules = 1` explains the game before the first line, for a policy that does not know it.
- The strategies near the equilibrium are frozen: sums of floats may round differently on another machine, and an
  opponent must act the same everywhere. They come from counterfactual regret minimisation, rounded to 255ths; a test
  measures their exploitability: 0.0003 chips per hand in Kuhn, 0.004 in Leduc.
- Two hexadecimal digits for each legal action, situations in the order of their names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from coordinator.environments.games import chance
from coordinator.environments.games.betting import (
    KUHN,
    LEDUC,
    BettingRules,
    BettingTable,
    situation,
    situations,
    strength,
)
from protocol.tasks import Reward

ACTIONS: Mapping[str, str] = {"fold": "f", "call": "c", "check": "c", "raise": "r", "bet": "r"}
SPOKEN: Mapping[str, str] = {"f": "fold", "c": "call", "r": "raise"}
"""Action → the word for it in the text."""

OPPONENTS = ("random", "rule", "cfr", "mixed")

ACTION_MAX_CHARS = 16
"""Longer turns are invalid and are not parsed."""

ILLEGAL_COSTS = 1

_WORDS = ("hold", "they", "board", " fold", " call", " raise", "fold", "call", "raise", "\n", ">")

_EXPLAINED = (
    "{name} poker. Each of two players puts in 1 chip and holds one of the cards {deck}.{board} Say fold, call, check "
    "or raise. A raise is {sizes} chips, {most} in a round at most. The higher card wins{pair}.\n"
)


@dataclass(frozen=True, slots=True)
class LimitPoker:
    """The environment of a limit poker game; subclasses choose the game."""

    opponent: str = "mixed"
    """random, rule, cfr (near the equilibrium), or mixed: the seed chooses one of these."""
    rules: int = 0
    game: ClassVar[BettingRules]
    distinct: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.opponent not in OPPONENTS:
            raise ValueError(f"opponent is one of {', '.join(OPPONENTS)}")
        if self.rules not in (0, 1):
            raise ValueError("rules is 0 or 1")

    @property
    def words(self) -> tuple[str, ...]:
        return (*_WORDS, *(f" {rank}" for rank in self.game.ranks))

    def reset(self, seed: int) -> "LimitHand":
        return LimitHand(self, seed)

    def demonstration(self, seed: int) -> tuple[str, ...]:
        """Return the turns of a player that chooses any allowed action."""
        hand, turns = self.reset(seed), list[str]()
        while not hand.table.over:
            legal = hand.table.legal
            action = legal[chance.below(len(legal), "demonstration", seed, len(turns))]
            turns.append(SPOKEN[action])
            hand.step(turns[-1])
        return tuple(turns)

    def explained(self) -> str:
        game = self.game
        if not self.rules:
            return ""
        two = len(game.raises) > 1
        return _EXPLAINED.format(
            name=game.name.capitalize(),
            deck=", ".join(game.deck),
            board=" After the first of two rounds one more card, the board, is laid open." if two else "",
            sizes=" then ".join(map(str, game.raises)),
            most=f"{game.raises_max} raise{'s' * (game.raises_max > 1)}",
            pair=", a pair with the board beats any" if two else "",
        )


class Kuhn(LimitPoker):
    """Kuhn poker: three cards, one round."""

    __slots__ = ()
    game: ClassVar[BettingRules] = KUHN


class Leduc(LimitPoker):
    """Leduc poker: six cards, two rounds, one open card."""

    __slots__ = ()
    game: ClassVar[BettingRules] = LEDUC


class LimitHand:
    """A hand in progress."""

    def __init__(self, environment: LimitPoker, seed: int) -> None:
        self._game, self._seed = environment.game, seed
        dealt = chance.shuffled(self._game.deck, self._game.name, seed, "deal")
        self._cards, self._open = (dealt[0], dealt[1]), dealt[2]
        self._seat = chance.below(2, self._game.name, seed, "seat")
        self._opponent = environment.opponent
        if self._opponent == "mixed":
            self._opponent = OPPONENTS[chance.below(3, self._game.name, seed, "opponent")]
        self._illegal = False
        self.table = BettingTable(self._game)
        self._opening = f"{environment.explained()}hold {self._cards[self._seat]}\n{self._wait()}>"

    @property
    def opening(self) -> str:
        return self._opening

    def step(self, action: str) -> str | None:
        meant = ACTIONS.get(action.strip().lower(), "") if len(action) <= ACTION_MAX_CHARS else ""
        if not meant or meant not in self.table.legal:
            self._illegal = True
            return None
        said = self._act(meant) + self._wait()
        return None if self.table.over else f"{said}>"

    def reward(self) -> Reward:
        if not self.table.over:
            chips = -self.table.stakes[self._seat]
        else:
            mine, theirs = (self._strength(seat) for seat in (self._seat, 1 - self._seat))
            chips = self.table.won(self._seat, (mine, theirs) if self._seat == 0 else (theirs, mine))
        score = float(chips - ILLEGAL_COSTS * self._illegal)
        return Reward(
            score, "invalid" if self._illegal else "ok", {"chips": float(chips), "legal": float(not self._illegal)}
        )

    def _wait(self) -> str:
        """Let the opponent act until it is the policy's turn or the hand is over; return the text about it."""
        said = ""
        while not self.table.over and self.table.actor != self._seat:
            action = self._drawn()
            said += f"they {SPOKEN[action]}\n" + self._act(action)
        return said

    def _act(self, action: str) -> str:
        """Apply an action; return the text with the open card if it ended the first round."""
        before = self.table.round
        self.table = self.table.after(action)
        return f"board {self._open}\n" if self.table.round > before else ""

    def _drawn(self) -> str:
        card, board = self._cards[1 - self._seat], self._board
        weights = weights_of(self._opponent, self._game, card, board, self.table)
        return self.table.legal[chance.weighted(weights, self._game.name, self._seed, "opponent", self.table.history)]

    @property
    def _board(self) -> str:
        return self._open if self.table.round else ""

    def _strength(self, seat: int) -> int:
        return strength(self._game, self._cards[seat], self._board)


def weights_of(opponent: str, game: BettingRules, card: str, board: str, table: BettingTable) -> Sequence[int]:
    """Return the weights of an opponent's actions, in the order of `BettingTable.legal`."""
    if opponent == "cfr":
        return near_equilibrium(game)[situation(card, board, table.history)]
    if opponent == "random":
        return [1] * len(table.legal)
    # The rule: raise with a pair or the highest card, fold the lowest to a raise, else call.
    good = strength(game, card, board) >= len(game.ranks) - 1
    wanted = "r" if good else "f" if card == game.ranks[0] else "c"
    return [int(action == (wanted if wanted in table.legal else "c")) for action in table.legal]


def transcript(
    card: str, board: str, history: str, player: int, game: BettingRules
) -> tuple[str, list[tuple[str, str]]]:
    """Return the texts on the way to a situation: the opening, and pairs of a turn and the text after it."""
    table, read = BettingTable(game), f"hold {card}\n"
    opening, turns = "", list[tuple[str, str]]()
    for action in history.replace("/", ""):
        if table.actor == player:
            opening, turns = _close(opening, turns, read)
            turns.append((SPOKEN[action], ""))
            read = ""
        else:
            read += f"they {SPOKEN[action]}\n"
        after = table.after(action)
        read += f"board {board}\n" if after.round > table.round else ""
        table = after
    return _close(opening, turns, read)


def _close(opening: str, turns: list[tuple[str, str]], read: str) -> tuple[str, list[tuple[str, str]]]:
    if not opening:
        return f"{read}>", turns
    return opening, [*turns[:-1], (turns[-1][0], f"{read}>")]


_TABLES = {
    "kuhn": ("c639aa55ff00ff0055aa00ff00ff00ffff00ff00718eaa55"),
    "leduc": (
        "ec13b34cf1090500ffd1200e00ffc03f00ff002ed100ff0050af00ff07f800ff0000ff00ff0000ff00ff02fd00ff0000fe00ff0011ee"
        "00ff02fd00ff0000fe00ff0000ff00ff01fe00ff0000fe00ff0000ff00ffec13fd02ff0000ff00ff0000ff00f708708fff0000ff00fb"
        "0004ff0000ff76890202fbff00d0002fff0001fe9c632501d9ff00a1005eff00718e00ff0900f6ff00b1004eff00cd32ed12ff0000ff"
        "00f60009ff0002fd99665801a6ff00de0021ff00ff00f00fc80037ff00dd0022fa0501fe01fee90015ff00ff0000ff00e11efe01ff00"
        "00fd0290006fff003fc000ff0052ad00ff006a9500ffff00fd02ff000030cff706017c83ff00dd2200ff0001fe43bc004fb0ed12827d"
        "00ff0035ca2dc30f956aea158e7100ff004ab53ebb06ab54eb14936c00ff000ef113e20a8c7300ff01fe0101fd00ff010df100ffe916"
        "00ff0000ff00ff0000ff00ff00ff00ff0000ff00ff005fa000ff2fd000ff0000ff00ff0000ff00ff768900ff0000ff00ff0051ae00ff"
        "ff00fc03946a0021de21d8072ad51be4a9566f9000f40b936c00ff00ff006b9450af009e61539f0c8e71ff00ff00827d00af50b24d00"
        "8b7448b77b8404fa01857a6189159b6443bc26d901d72700ff00a05f00ffff00ff00ff0000f40bff0000fb04f7087788fe0001fb04ff"
        "0000ff00fe01ff00ff00009f60fb0004ff00fd02ff00ff0000f906fa0005ff00ff00ff00ff00008080ff0000fa056996b24d01a35b00"
        "ff46b9001de2fd02bd42718e00fd028d7100fd0201fee21d618c127986b64900fd028d72a15e778701fd02b24d00cb34de21926db44a"
        "00ee117c8300ff00798600ff0020df00ff0001fe00ff02fd00ff0000ff00ff0000ff00fffd0200ff0000ff00ff005da200ff807f00ff"
        "0000ff00ff0000ff00ff01fe00ff0000ff00ff0000ff00ff"
    ),
}


@cache
def near_equilibrium(rules: BettingRules) -> Mapping[str, Sequence[int]]:
    """Return the weights of the legal actions in each situation, in 255ths."""
    digits, weights = bytes.fromhex(_TABLES[rules.name]), dict[str, Sequence[int]]()
    places = {name: len(table.legal) for name, table in situations(rules)}
    start = 0
    for name in sorted(places):
        weights[name] = list(digits[start : start + places[name]])
        start += places[name]
    return weights
