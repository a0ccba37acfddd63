"""A peer killed in the middle of a version: it goes on from what it had stored, and fetches none of that again."""

from pathlib import Path

import pytest

from protocol.limits import KIB, MIB
from tests.processes.programs import Swarm, until
from tests.processes.rounds import Coordinator, Settings, blobs_of, held, mirror, operator_of, random_weights

pytestmark = pytest.mark.processes

CHUNK_BYTES = 16 * KIB
SIZE_BYTES = 32 * MIB
SETTINGS: Settings = {"publish": {"chunk_size_bytes": CHUNK_BYTES}}


def test_a_peer_killed_in_mid_download_resumes_from_its_disk(swarm: Swarm) -> None:
    coordinator = Coordinator(swarm, SETTINGS).start()
    operator = operator_of(swarm, coordinator, random_weights(swarm.folder / "small", seed=1, size_bytes=4 * KIB))
    operator.publish()
    peer = mirror(swarm, "peer", coordinator.join_string)
    held(peer, 1)
    before = blobs_of(swarm, peer)

    operator.policy = random_weights(swarm.folder / "large", seed=2, size_bytes=SIZE_BYTES)
    operator.publish()
    until(
        "the peer to be in the middle of version 2", lambda: len(blobs_of(swarm, peer)) > SIZE_BYTES // CHUNK_BYTES // 8
    )
    peer.kill()
    stored = {name: size for name, size in blobs_of(swarm, peer).items() if name not in before}
    size_bytes = sum(path.stat().st_size for path in operator.policy.iterdir())
    assert 0 < sum(stored.values()) < size_bytes, "it was not in the middle"

    again = mirror(swarm, "peer", coordinator.join_string)
    folder = Path(str(held(again, 2)["folder"]))
    assert (folder / "model.safetensors").read_bytes() == (operator.policy / "model.safetensors").read_bytes()
    said = again.said(r"version fetched version=2 .*from_peers=(\d+) from_seeder=(\d+) from_http=(\d+) on_disk=(\d+)")
    fetched, on_disk = sum(map(int, said.groups()[:3])), int(said[4])
    assert on_disk >= sum(stored.values())
    assert fetched + on_disk == size_bytes
    assert "Traceback" not in again.log
