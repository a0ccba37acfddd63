"""Strategies for Kuhn and Leduc poker near the equilibrium, frozen: `poker_solver.solve`, rounded to 255ths.

- They are computed once and stored, since sums of floats may round differently on another machine, and an opponent
  must act the same everywhere. A test solves the games again and compares.
- Two hexadecimal digits for each legal action, situations in the order of their names. Exploitability: 0.0003 chips per
  hand in Kuhn, 0.004 in Leduc.
"""

from collections.abc import Mapping, Sequence
from functools import cache

from coordinator.environments.games.betting import BettingRules
from coordinator.environments.games.poker_solver import situations

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
