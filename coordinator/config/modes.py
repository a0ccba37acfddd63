"""Modes of a round: each changes the defaults of a few settings, which the file may still override.

| mode | what happens |
|---|---|
| `echo2` | nodes sample while the learner trains and versions spread; admission keeps groups from becoming too old |
| `push-pull` | Echo's replay buffer: nodes sample without pause, the learner trains on what is there, S filters |
| `sequential` | Echo's pull: all nodes have the newest version before they sample; no steps overlap |
| `colocated` | central training: one local node on the learner's device, in turns with it, and no other nodes |
"""

from collections.abc import Mapping
from typing import Any, Literal, cast, get_args

ModeName = Literal["echo2", "push-pull", "sequential", "colocated"]

IN_TURNS = {"max_updates": 0, "publish_every": 1}
"""S = 0: a batch is sampled from the newest version, then trained on, then published, one step at a time."""

UNAUDITED = {"first_groups": 0, "floor": 0.0, "trusted_floor": 0.0, "max_owner_share": 1.0}
"""Settings without audits, for a local node."""

PRESETS: dict[ModeName, dict[str, dict[str, Any]]] = {
    "echo2": {},
    "push-pull": {"staleness": {"admission": "buffer"}},
    "sequential": {"staleness": IN_TURNS},
    "colocated": {
        "staleness": IN_TURNS,
        "fleet": {"local_nodes": 1, "strangers": False},
        "audit": UNAUDITED,
    },
}


def with_mode(table: Any) -> Any:
    """Return the operator's table on top of its mode's defaults; a value that is no table is left to the checks."""
    place = table.get("round", {}) if isinstance(table, Mapping) else None
    mode = place.get("mode") if isinstance(place, Mapping) else None
    if mode not in get_args(ModeName):
        return table
    merged = dict(table)
    for section, defaults in PRESETS[cast(ModeName, mode)].items():
        keys = table.get(section, {})
        if isinstance(keys, Mapping):
            merged[section] = {**defaults, **keys}
    return merged
