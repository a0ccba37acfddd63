"""One node with several graphics cards in a real round: one key, one line in the ledger, and cards that come and go.

The cards exist only in a file of readings; their engine children are real, and compute on the CPU.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes.programs import PATIENCE_S, Swarm, script, until
from tests.processes.rounds import (
    NOBODY_LEARNS,
    Coordinator,
    Settings,
    assert_ledger_is_sound,
    node_id_of,
    operator_of,
)

pytestmark = pytest.mark.processes

PROGRAM = str(Path(__file__).with_name("card_node.py"))
GB = 10**9
CARDS = 4
SETTINGS: Settings = {
    "sampling": {"samples_per_group": 16, "max_new_tokens": 200},
    **NOBODY_LEARNS,
    "leases": {"groups_per_request": 8, "newcomer_leases": 8},
}


def reading(number: int, **changes: Any) -> dict[str, Any]:
    card = {"vendor": "nvidia", "name": f"Fake {number}", "number": number, "memory_bytes": 24 * GB, "used_bytes": GB}
    return card | {"celsius": 50.0, "watts": 200.0} | changes


class CardNode:
    """A node with cards that exist only in a file of readings, and what its owner types and sees."""

    def __init__(self, swarm: Swarm, coordinator: Coordinator) -> None:
        self.home, self._file = swarm.folder / "home", swarm.folder / "cards.json"
        self.cool = [*(reading(number) for number in range(CARDS)), reading(4, name="Small", memory_bytes=2 * GB)]
        self.read(*self.cool)
        words = (PROGRAM, str(self._file), coordinator.join_string, str(self.home), str(4 * GB))
        self.program = swarm.start("cards", sys.executable, *words)
        self.node_id = node_id_of(self.program)

    def read(self, *cards: dict[str, Any]) -> None:
        """Replace the readings at once: the node may read at any moment."""
        self._file.with_suffix(".new").write_text(json.dumps(cards))
        self._file.with_suffix(".new").replace(self._file)

    def command(self, *words: str) -> str:
        """Run a command as an owner types it in another terminal."""
        full = [script("swarm-node"), *words, "--home", str(self.home)]
        done = subprocess.run(full, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def cards(self) -> list[dict[str, Any]]:
        cards: list[dict[str, Any]] = json.loads(self.command("status", "--json"))["cards"]
        return cards

    def card(self, number: int, state: str, reason: str = "") -> dict[str, Any]:
        """Wait until a card is in a state."""

        def look() -> dict[str, Any] | None:
            now = self.cards()[number]
            return now if now["state"] == state and reason in now["reason"] else None

        found = until(f"card {number} to be {state}", look)
        assert found
        return found

    def all_have_sampled(self) -> None:
        """Wait until each card was seen with a group; where they are fast, not all have one at the same time."""
        seen = set[int]()

        def look() -> bool:
            seen.update(number for number, card in enumerate(self.cards()[:CARDS]) if card["groups"])
            return len(seen) == CARDS

        until("four cards to sample", look)


@pytest.mark.slow
def test_one_node_with_four_cards_of_which_one_is_paused_one_killed_and_one_too_hot(swarm: Swarm, policy: Path) -> None:
    coordinator = Coordinator(swarm, SETTINGS).start()
    operator_of(swarm, coordinator, policy).publish()
    node = CardNode(swarm, coordinator)
    node.program.said(r"card 4: too small for this round's model: 1.0 GB free, about 4.0 GB needed")
    node.program.said("registered")

    node.all_have_sampled()
    working = node.cards()
    assert len({one["pid"] for one in working[:CARDS]}) == CARDS
    assert (working[4]["state"], working[4]["pid"]) == ("left out", None)

    assert "resume --card 1" in node.command("pause", "--card", "1")
    paused = node.card(1, "resting", "paused by you; `swarm-node resume --card 1` continues")
    until("its child to end", lambda: node.cards()[1]["pid"] is None)
    assert paused["groups"] == 0
    node.command("snooze", "60", "--card", "0")
    node.card(0, "resting", "paused by you until ")

    killed = node.card(2, "sampling")["pid"]
    os.kill(killed, signal.SIGKILL)
    until("card 2 to be back", lambda: node.card(2, "sampling")["pid"] not in (None, killed))

    node.command("limits", "--card", "3", "--celsius", "80")
    node.read(*node.cool[:3], reading(3, celsius=91.0), node.cool[4])
    node.card(3, "resting", "temperature limit: 91 °C, your limit is 80 °C; work resumes at 75 °C")
    shown = node.command("status")
    assert "card 3    Fake 3: resting" in shown
    assert "91 °C, 200 W, 1.0 of 24.0 GB used; temperature limit" in shown
    assert "card 4    Small: left out" in shown
    assert "doing     generating" in shown, "card 2 works"

    node.read(*node.cool)
    node.card(3, "sampling")
    node.command("resume")
    for number in range(CARDS):
        node.card(number, "sampling")
    speeds = sum(one["tokens_per_s"] for one in node.cards()[:CARDS])
    row = node.node_id
    until("the sum of the speeds", lambda: abs(coordinator.leaderboard()[row]["tokens_per_s"] - speeds) < 1)
    assert_all_is_accepted(node, coordinator)


def assert_all_is_accepted(node: CardNode, coordinator: Coordinator) -> None:
    """End the node; require that no group was lost, and that one key earned everything."""
    node.command("finish")
    assert node.program.process.wait(timeout=PATIENCE_S) == 0, node.program.log
    assert "Traceback" not in node.program.log
    earnings = json.loads(node.program.output)
    assert earnings["rejected"] == {}
    states = coordinator.leases_of(node.node_id)
    assert set(states.values()) == {"accepted"}, "no group was lost or returned: other cards took them over"
    assert len(states) == earnings["accepted"] > CARDS
    assert list(coordinator.leaderboard()) == [node.node_id], "one key"
    assert_ledger_is_sound(coordinator)
