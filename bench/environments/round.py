"""Rounds of Sokoban for the benches: there is work for longer than anything is measured.

- The policy knows nothing, so that each episode has its four turns.
"""

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

TURNS, SAMPLES = 4, 16
SETTINGS: Mapping[str, object] = {
    "task.name": "sokoban",
    "sampling.max_new_tokens": 160,
    "sampling.samples_per_group": SAMPLES,
    "staleness.max_updates": 200,
    "learner.groups_per_update": 512,
    "audit.first_groups": 0,
    "audit.floor": 0,
    "audit.trusted_floor": 0,
    "leases.over_issue": 0,
}
PARAMETERS = {"boxes": 1, "pulls": 4, "turns": TURNS, "moves": 4}
TURN_TOKENS_MAX = 6


class Play(NamedTuple):
    """The form of episodes that a checkout knows."""

    settings: Mapping[str, object]
    """The settings of a turn."""


CHAINS = Play({"task.parameters": PARAMETERS, "episode.turn_tokens_max": TURN_TOKENS_MAX})
NODE_SIDE = Play({"task.parameters": PARAMETERS | {"turn_tokens_max": TURN_TOKENS_MAX}})
"""The episodes as the node played them, in checkouts without chains of leases."""


def settings(play: Play = CHAINS) -> Mapping[str, object]:
    """Return the settings of a round whose episodes have this form."""
    return {**SETTINGS, **play.settings}


def whole_groups(folder: Path) -> int:
    """Return the number of groups in a round's store whose episodes have ended and are judged."""
    with closing(sqlite3.connect(f"file:{folder / 'round' / 'state.db'}?mode=ro", uri=True)) as store:
        ((count,),) = store.execute("SELECT COUNT(*) FROM rollouts WHERE state = 'buffered'")
    return int(count)
