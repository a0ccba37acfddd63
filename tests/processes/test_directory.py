"""A directory with three rounds of which one lies about its payouts: the lie is found in its own log, by name."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from coordinator.publishing.signed_metadata import SignedMetadata
from protocol.wire.signing import canonical_json, to_sign
from swarm_node.cli import app
from tests.processes.programs import Swarm, script, until
from tests.processes.rounds import NOBODY_LEARNS, Coordinator, Settings, operator_of
from tests.swarm_node.web import Handler, Web

pytestmark = pytest.mark.processes

SETTINGS: Settings = {"sampling": {"samples_per_group": 2, "max_new_tokens": 8}, **NOBODY_LEARNS}


class BoastingFront:
    """A server in front of a round that shows its files as they are, and boasts in its listing when told to."""

    def __init__(self) -> None:
        self.round: Coordinator | None = None
        self.boasts = False
        self.web = Web(self._answer)

    def _answer(self, handler: Handler) -> None:
        assert self.round
        reply = httpx.get(f"{self.round.url}{handler.path}")
        body = reply.content
        if self.boasts and handler.path == "/v1/listing":
            body = self._boast(json.loads(body), self.round.folder)
        handler.answer(reply.status_code, body)

    def _boast(self, listing: dict[str, Any], folder: Path) -> bytes:
        """Say that a lot was paid, signed by the round's own key, which lies on the operator's machine."""
        signed = listing["signed"]
        signed["totals"]["paid_micros"] = 9_000_000
        signer = SignedMetadata(folder / "keys", folder / "metadata", 3600.0)
        signature = signer.sign_for_ledger(to_sign("listing", canonical_json(signed)))
        return json.dumps(listing | {"signature": signature.hex()}).encode()


def started(swarm: Swarm, name: str, purpose: str, url: str = "") -> Coordinator:
    about = {"title": name.capitalize(), "purpose": purpose, "unit": "EUR", "public_url": url}
    return Coordinator(swarm, {**SETTINGS, "round": about}, name=name).start()


def run(home: Path, *words: str) -> Result:
    """Run a command of the node in this process."""
    return CliRunner().invoke(app, [*words, "--home", str(home)])


def test_of_three_rounds_the_one_that_lies_is_refused_and_a_node_joins_and_moves(swarm: Swarm, policy: Path) -> None:
    front = BoastingFront()
    swarm.at_end(front.web.close)
    plans = [("rivers", "maps of water"), ("lakes", "poems"), ("glaciers", "maps of water and ice", front.web.url)]
    with ThreadPoolExecutor() as pool:
        rivers, lakes, liar = pool.map(lambda plan: started(swarm, *plan), plans)
    front.round = liar
    operator_of(swarm, rivers, policy).publish()
    out, curator, home = swarm.folder / "rounds.json", swarm.folder / "curator", swarm.folder / "home"
    joins = [rivers.join_string, lakes.join_string, liar.join_string]
    made = run(curator, "directory", "make", str(out), *joins, "--name", "rounds.example")
    assert made.output.count("verified: ") == 3, made.output
    place = f"{out}#{made.output.split('#')[-1].strip().rstrip(chr(39))}"

    front.boasts = True
    listed = run(home, "rounds", "--directory", place)
    assert "Glaciers" in listed.output
    assert "Refused" not in listed.output, "the directory has what the round said before"
    verified = run(home, "rounds", "--verify").output
    lie = f"Glaciers ({liar.join_string[-64:][:8]}) says that it has paid 9.00 EUR"
    assert lie in verified.partition("Refused:")[2], verified
    assert verified.count("proved by") == 2
    assert verified.count("  Earnings: ") == 2
    assert "refuses the round Glaciers" in str(run(home, "join", liar.join_string).exception)
    assert "refused: Glaciers" in run(curator, "directory", "make", str(out)).output

    words = ("--best", "cause", "--cause", "water", "--yes", "--home", str(home), "--threads", "1", "--json")
    agent = swarm.start("agent", script("swarm-node"), "join", *words)
    agent.said("Proposed: Rivers")
    until("accepted work", lambda: rivers.accepted_groups() > 0)
    assert "Moving" in run(home, "move", lakes.join_string).output
    until("the node in the other round", lambda: lakes.status()["nodes_alive"] == 1)
    assert set(rivers.leases()) <= {"accepted", "cancelled"}, "a lease was lost"
    agent.interrupt()
