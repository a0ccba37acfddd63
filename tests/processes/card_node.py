"""A node whose graphics cards exist only in a file; run as a program: FILE JOIN_STRING HOME NEED_BYTES.

- The readings of the cards come from FILE, which a test may change; everything else is the agent as `join` starts it.
- Each card has a real engine child, which computes on the CPU.
"""

import json
import logging
import sys
from functools import partial
from pathlib import Path

import trio

from swarm_node import app
from swarm_node.base import logs
from swarm_node.commands.join import build_member
from swarm_node.commands.options import ReachOptions
from swarm_node.engine.cards import engine_cards, select_cards
from swarm_node.engine.choose import EngineOptions, for_policy
from swarm_node.machine.gpu import Card, GpuProbe

GROUPS_PER_CARD = 2


def read_cards(file: Path) -> GpuProbe:
    """Return the cards of the file, in the place of a vendor's program."""
    return GpuProbe(tuple(Card(**card) for card in json.loads(file.read_text())))


def main(file: Path, join_string: str, home: Path, need_bytes: int) -> None:
    logs.to_stderr(quiet=False)
    seen = select_cards(read_cards(file), (), {}, on_card=True)
    for card in engine_cards(seen, need_bytes):
        logging.getLogger(__name__).info("card %d: %s", card.number, card.left_out or "used")
    settings = app.AgentSettings(
        rounds=(
            app.RoundChoice(
                build_member(join_string, home, "cards", ReachOptions(), {}, price=1_000_000),
                partial(for_policy, "llama", EngineOptions(threads=1, device="cpu")),
            ),
        ),
        groups_per_request=GROUPS_PER_CARD,
        cards=engine_cards(seen, need_bytes),
        look_at_cards=partial(read_cards, file),
    )
    print(json.dumps(vars(trio.run(app.run, settings).rounds[0])))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
