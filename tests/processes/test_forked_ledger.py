"""A running node is told another history than before: it says so, keeps a proof that convinces anybody, and ends."""

from pathlib import Path

import httpx
import pytest
import trio

from coordinator.publishing.signed_metadata import SignedMetadata
from ledger.checkpoint import Checkpoint, ledger_key, sign
from ledger.tree import leaf_hash
from swarm_node.coordinator_api.join_string import parse, round_folder
from swarm_node.coordinator_api.origin import COORDINATORS, Origin
from swarm_node.ledger.log_reader import LogReader
from swarm_node.ledger.log_watch import LogWatch
from tests.ledger import naive_tree
from tests.ledger.values import deposit, version
from tests.processes.impostor import Impostor
from tests.processes.programs import PATIENCE_S, Program, Swarm, script, until
from tests.processes.rounds import Coordinator, join

pytestmark = pytest.mark.processes

REWRITTEN = [deposit(10**9), *map(version, range(1, 8))]
"""More than a new round has."""


def ends(program: Program) -> int:
    code: int = program.process.wait(timeout=PATIENCE_S)
    return code


def sees_the_log(join_string: str, home: Path) -> int:
    """Check the log as a running node does, and store the result; return the number of entries."""
    place = parse(join_string)

    async def look() -> int:
        async with httpx.AsyncClient() as client:
            reader = LogReader(Origin(f"{place.url}/v1", client, COORDINATORS))
            return (await LogWatch(reader, place.round_id, round_folder(home, place) / "ledger").refresh())[1].size

    return trio.run(look)


def rewritten(coordinator: Coordinator) -> dict[str, bytes]:
    """Another history, longer and signed with the ledger's own key, as public files."""
    metadata = SignedMetadata(coordinator.folder / "keys", coordinator.folder / "metadata", 600.0)
    key = ledger_key(metadata.round_id, metadata.ledger_public())
    bodies = [entry.body for entry in REWRITTEN]
    checkpoint = Checkpoint(key.name, len(bodies), naive_tree.mth(bodies))
    return {
        "/v1/ledger/checkpoint": sign(checkpoint, key, metadata.sign_for_ledger),
        f"/v1/ledger/tile/0/000.p/{len(bodies)}": b"".join(map(leaf_hash, bodies)),
    }


def test_running_node_that_is_shown_a_rewritten_log_says_so_keeps_the_proof_and_ends(swarm: Swarm) -> None:
    coordinator = Coordinator(swarm, {}).start()
    impostor = Impostor(coordinator.address)
    swarm.at_end(impostor.close)
    address = coordinator.join_string.replace(coordinator.url, impostor.url)
    home = swarm.folder / "node"
    until("a signed checkpoint", lambda: coordinator.http.get("/v1/ledger/checkpoint").is_success)
    seen = sees_the_log(address, home)
    assert 0 < seen < len(REWRITTEN)

    impostor.lies = rewritten(coordinator)
    node = join(swarm, "node", address, home=home)
    assert ends(node) == 1
    assert "registered" in node.log
    assert "[ledger_forked]" in node.log
    assert "Traceback" not in node.log
    [proof] = (round_folder(home, parse(address)) / "ledger").glob("fork-*.proof")
    assert str(proof) in node.log

    check = swarm.start("check", script("swarm-node"), "ledger", "check", address, str(proof))
    assert (ends(check), check.output) == (
        0,
        f"Verified fork: the ledger's key signed two histories, of {seen} and {len(REWRITTEN)} entries.\n",
    )
    impostor.lies = {}
    again = join(swarm, "node", address, home=home)
    assert ends(again) == 1
    assert str(proof) in again.log
    assert "registered" not in again.log
