"""An operator's environment in a real round: kill -9 its process, then the coordinator, and the episodes go on."""

import os
import signal
from contextlib import closing, suppress
from pathlib import Path

import pytest
import sqlalchemy as sa

from protocol.policy.codec import PolicyCodec
from protocol.work.lease import Lease
from protocol.work.messages import SubmissionReply
from protocol.work.rollout import unpack_tokens
from tests.processes.light_node import END, LightNode
from tests.processes.programs import Swarm, until
from tests.processes.rounds import Coordinator, Settings, assert_ledger_is_sound, operator_of

pytestmark = pytest.mark.processes

ENVIRONMENT = """
def problems(split, seed):
    first = {"train": 0, "validation": 200, "held_out": 400}[split]
    for number in range(first, first + 100):
        yield {"prompt": f"{number}+", "start": number}


class Environment:
    def __init__(self, problem, goal=100):
        self.total, self.turns, self.goal = problem.columns["start"], 0, goal

    def step(self, turn):
        self.total += int(turn or 0)
        self.turns += 1
        return None if self.turns == 4 else f"={self.total}+"

    def reward(self):
        return {"score": float(self.total == self.goal), "total": self.total}
"""


def environment_processes(coordinator: Coordinator) -> list[int]:
    """The processes in which the coordinator plays."""
    found = list[int]()
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):
            parents = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("PPid:")]
            command = (status.parent / "cmdline").read_bytes()
            if parents == [str(coordinator.program.process.pid)] and b"task_child" in command:
                found.append(int(status.parent.name))
    return found


def next_turn(node: LightNode, version: int, reply: SubmissionReply) -> Lease:
    """The next turn: the environment's answer is in the reply, unless this machine is too busy; then it is asked for.

    It is never asked for if the reply had it: nobody else gets the turn before that lease expires.
    """
    leases = list(reply.leases)

    def came() -> bool:
        leases.extend(node.lease(version, turns_only=True))
        return bool(leases)

    if not leases:
        until("the next turn", came)
    return leases[0]


def test_episodes_outlive_their_process_and_the_coordinator(swarm: Swarm, policy: Path) -> None:
    file = swarm.folder / "adding.py"
    file.write_text(ENVIRONMENT)
    settings: Settings = {
        "task": {"name": str(file), "parameters.goal": 10},
        "episode": {"turn_tokens_max": 4},
        "sampling": {"samples_per_group": 2, "max_new_tokens": 64},
        "reward": {"timeout_s": 60.0, "processes": 1},
        "learner": {"groups_per_update": 1},
    }
    coordinator = Coordinator(swarm, settings).start()
    operator = operator_of(swarm, coordinator, policy)
    version = operator.publish()
    codec = PolicyCodec((policy / "tokenizer.json").read_text())
    said = [*codec.encode("2"), END]
    with closing(LightNode(coordinator.join_string)) as node:
        node.register()
        (lease,) = node.lease(version)
        start = int(codec.decode(unpack_tokens(lease.prompt).tolist()).removesuffix("+"))
        assert not lease.prefixes

        reply = node.submitted(node.turn(lease, said))
        assert reply.verdicts[0].outcome == "accepted"
        lease = next_turn(node, version, reply)
        assert codec.decode(unpack_tokens(lease.prefixes[0].tokens).tolist()).endswith(f"={start + 2}+")

        (pid,) = environment_processes(coordinator)
        os.kill(pid, signal.SIGKILL)
        reply = node.submitted(node.turn(lease, said))
        assert reply.verdicts[0].outcome == "accepted"
        lease = next_turn(node, version, reply)
        assert codec.decode(unpack_tokens(lease.prefixes[0].tokens).tolist()).endswith(f"={start + 4}+")
        assert environment_processes(coordinator) != [pid]

        third = node.turn(lease, said)
        reply = node.submitted(third)
        assert reply.verdicts[0].outcome == "accepted"
        coordinator.program.kill()
        coordinator.start()
        lost = next_turn(node, version, reply)
        coordinator.program.kill()
        coordinator.start()
        again = node.submitted(third)
        assert again.verdicts[0].outcome == "already_accepted"
        (lease,) = again.leases
        assert (lease.prefixes, lease.seed) == (lost.prefixes, lost.seed)
        assert lease.lease_id != lost.lease_id, "the node may not know of the lease that was offered before the kill"
        assert codec.decode(unpack_tokens(lease.prefixes[1].tokens).tolist()).endswith(f"={start + 6}+")
        assert node.submit(node.turn(lease, said))[0].outcome == "accepted"

    def judged() -> bool:
        with coordinator.copy_of_store() as connection:
            states = list(connection.execute(sa.text("SELECT state FROM rollouts ORDER BY accepted_ms")).scalars())
        return states == ["part", "part", "part", "buffered"]

    until("the last turn to be judged", judged)
    (group,) = operator.client.batch(1).groups
    assert [sample.reward for sample in group.samples] == [float(start + 8 == 10)] * 2
    assert bytes(group.samples[0].sampled).startswith(b"\1\1\0")
    assert len(group.earlier) == 3
    assert_ledger_is_sound(coordinator)
