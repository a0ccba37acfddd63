"""A peer that is stopped in the middle of a version: nobody waits for it, and later it catches up.

- `SIGSTOP` leaves its connections open and silent, which is what a machine that sleeps or hangs looks like.
"""

import signal
from pathlib import Path

import pytest

from protocol.limits import KIB, MIB
from tests.processes.programs import Program, Swarm, until
from tests.processes.rounds import Coordinator, Settings, blobs_of, held, mirror, operator_of, random_weights

pytestmark = pytest.mark.processes

SETTINGS: Settings = {"publish": {"chunk_size_bytes": 64 * KIB}}
SIZE_BYTES = 64 * MIB
CHUNKS = SIZE_BYTES // (64 * KIB)
FROZEN_AT_CHUNKS = CHUNKS // 8


@pytest.mark.slow
def test_a_peer_frozen_in_mid_download_holds_up_nobody_and_catches_up_when_it_thaws(swarm: Swarm) -> None:
    coordinator = Coordinator(swarm, SETTINGS).start()
    operator = operator_of(swarm, coordinator, random_weights(swarm.folder / "small", seed=1, size_bytes=4 * KIB))
    operator.publish()
    others = [mirror(swarm, name, coordinator.join_string) for name in ("first", "second")]
    frozen = mirror(swarm, "frozen", coordinator.join_string)
    for program in (*others, frozen):
        held(program, 1)

    operator.policy = random_weights(swarm.folder / "large", seed=2, size_bytes=SIZE_BYTES)
    operator.publish()
    until("the peer to be in the middle of version 2", lambda: len(blobs_of(swarm, frozen)) >= FROZEN_AT_CHUNKS)
    frozen.process.send_signal(signal.SIGSTOP)
    for program in others:
        assert fetched(program) == published(operator.policy)
        assert "version not fetched" not in program.log, "it gave up, and began anew without the frozen one"
    stored = len(blobs_of(swarm, frozen))
    assert FROZEN_AT_CHUNKS <= stored < CHUNKS, "it was not in the middle"

    frozen.process.send_signal(signal.SIGCONT)
    assert fetched(frozen) == published(operator.policy)
    assert "Traceback" not in "".join(program.log for program in (*others, frozen))


def fetched(program: Program) -> bytes:
    return published(Path(str(held(program, 2)["folder"])))


def published(policy: Path) -> bytes:
    return (policy / "model.safetensors").read_bytes()
