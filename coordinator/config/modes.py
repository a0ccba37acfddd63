"""Ways to run a round: each is no more than other defaults for a few settings, which the file may still override.

| mode | what happens |
|---|---|
| `echo2` | nodes sample while the learner trains and versions travel, admitted so that nothing grows too old |
| `push-pull` | Echo's replay buffer: nodes sample without pause, the learner takes what is there, S filters |
| `sequential` | Echo's pull: everybody has the newest version before anything is sampled; nothing overlaps |
| `colocated` | central training: a node of our own on the learner's device, in turns with it, and nobody else |
"""

from collections.abc import Mapping
from typing import Any, Literal, cast, get_args

ModeName = Literal["echo2", "push-pull", "sequential", "colocated"]

IN_TURNS = {"max_updates": 0, "publish_every": 1}
"""S = 0: a batch is sampled from the newest version, trained on, published, and nothing else happens meanwhile."""

UNAUDITED = {"first_groups": 0, "floor": 0.0, "trusted_floor": 0.0, "max_owner_share": 1.0}
"""For a node of our own."""

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
    """The operator's table on top of its mode's defaults; what is no table is left for the checks to refuse."""
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
