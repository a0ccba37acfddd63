"""Two strangers vouch for a running coordinator's log: who wants both is content, who wants three is told."""

from functools import partial
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ledger.note import KeyKind, NoteKey
from swarm_node.keys import identity
from tests.ledger import notes
from tests.processes.programs import Swarm, said, until
from tests.processes.rounds import Coordinator, operator_of

pytestmark = pytest.mark.processes


def key_of(home: Path, name: str) -> NoteKey:
    """A witness's key, made before its first run, as an operator would be told of it."""
    seed = identity.load_or_create(home / "witness.key").seed
    public = Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()
    return NoteKey(name, public, KeyKind.WITNESS)


def test_two_witnesses_vouch_for_a_running_log_and_a_third_is_missed(swarm: Swarm, policy: Path) -> None:
    homes = {name: swarm.folder / name for name in ("ann", "ben")}
    keys = [key_of(home, name) for name, home in homes.items()]
    coordinator = Coordinator(swarm, {"ledger": {"witnesses": [str(key) for key in keys]}}).start()
    join = coordinator.join_string
    until("a signed checkpoint", lambda: coordinator.http.get("/v1/ledger/checkpoint").is_success)
    first = size_of(coordinator)
    for number, (name, home) in enumerate(homes.items(), 1):
        before = size_of(coordinator)
        words = ("ledger", "witness", join, "--home", str(home), "--name", name, "--submit")
        assert "coordinator: recorded" in said(swarm, "swarm-node", *words)
        operator_of(swarm, coordinator, policy).publish(number)  # the second one sees a longer log
        until("a longer log", partial(is_longer, coordinator, before))
    named = [word for key in keys for word in ("--witness", str(key))]
    output = said(swarm, "swarm-node", "ledger", "verify", join, *named)
    assert f"2 of 2 witnesses signed the first {first} entries." in output
    third = ("--witness", str(notes.witness(3)[0]))
    refused = said(swarm, "swarm-node", "ledger", "verify", join, *named, *third, code=1)
    assert "2 of the 3 witnesses have signed this log; 3 are required." in refused
    assert "2 of 3 witnesses" in said(swarm, "swarm-node", "ledger", "verify", join, *named, *third, "--quorum", "2")


def size_of(coordinator: Coordinator) -> int:
    """Return the number of published entries."""
    return int(coordinator.http.get("/v1/ledger/checkpoint").text.splitlines()[1])


def is_longer(coordinator: Coordinator, size: int) -> bool:
    return size_of(coordinator) > size
