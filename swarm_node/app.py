"""Wiring of the node agent: every machine is made here, and they know each other only through here."""

from contextlib import suppress
from dataclasses import dataclass

import trio

from protocol.errors import SwarmError
from swarm_node import member
from swarm_node.engine.client import Choose, open_engine
from swarm_node.member import cancel_on_signal, open_member
from swarm_node.notices import Notices
from swarm_node.outbox import Outbox
from swarm_node.pulse import Pulse
from swarm_node.receipts import Claims
from swarm_node.sender import Sender
from swarm_node.teller import Teller
from swarm_node.worker import Worker

FINAL_SEND_S = 10.0
"""At the end of the round, how long the last rollouts may take to be judged."""


@dataclass(frozen=True)
class Settings:
    """What the owner chose."""

    member: member.Settings
    groups_per_request: int
    engine_command: Choose


@dataclass(frozen=True)
class Earnings:
    """What a run of the agent came to."""

    accepted: int
    rejected: dict[str, int]
    tokens: int
    credit_micros: int


async def run(settings: Settings) -> Earnings:
    """Take part in a round until it is finished or a signal comes."""
    async with open_member(settings.member) as me:
        outbox = Outbox(me.folder / "outbox")
        sender = Sender(me.coordinator, outbox, Claims(me.folder / "claims"))
        async with open_engine(settings.engine_command, log=None) as engine, trio.open_nursery() as nursery:
            teller = Teller(me.coordinator, me.key, settings.member.join.round_id)
            worker = Worker(
                coordinator=me.coordinator,
                policies=me.policies,
                engine=engine,
                outbox=outbox,
                sender=sender,
                teller=teller,
                key=me.key,
                round_id=settings.member.join.round_id,
                groups_per_request=settings.groups_per_request,
            )
            pulse = Pulse(me, worker)
            nursery.start_soon(cancel_on_signal, me.signals, nursery.cancel_scope)
            await pulse.register()
            notices = Notices(me.coordinator, me.folder)
            for machine in (pulse, me.policies, me.log_watch, sender, worker, notices):
                nursery.start_soon(machine.run)
            nursery.start_soon(pulse.listen)
            nursery.start_soon(teller.run, worker.drop)
            await worker.finished.wait()
            await _drain(sender, outbox)
            with suppress(SwarmError):  # the round is over, whether or not this is still heard
                await pulse.beat()
            nursery.cancel_scope.cancel()
    accepted = sender.verdicts.pop("accepted", 0) + sender.verdicts.pop("already_accepted", 0)
    return Earnings(accepted, dict(sender.verdicts), sender.tokens, sender.credit_micros)


async def _drain(sender: Sender, outbox: Outbox) -> None:
    """Give the last rollouts their chance."""
    with trio.move_on_after(FINAL_SEND_S):
        while len(outbox):
            sender.wake()
            await trio.sleep(0.1)
