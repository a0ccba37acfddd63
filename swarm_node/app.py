"""Wiring of the node agent: creates all parts and connects them."""

import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import trio

from protocol.errors import SwarmError
from swarm_node import member
from swarm_node.allowance.governor import Governor
from swarm_node.base.clock import now_ms
from swarm_node.base.waiting import first_of
from swarm_node.doctor.forecast import record_speed
from swarm_node.engine.client import Choose, open_engine
from swarm_node.ledger.notices import Notices
from swarm_node.ledger.receipts import Claims
from swarm_node.member import Member, cancel_on_signal, open_member
from swarm_node.owner import stopped
from swarm_node.owner.control_server import listening
from swarm_node.owner.snapshot import Agent, AgentSnapshot
from swarm_node.work.lease_log import Leased
from swarm_node.work.progress_reporter import ProgressReporter
from swarm_node.work.pulse import Pulse
from swarm_node.work.rejections import FOLDER, Refusals
from swarm_node.work.sender import Outbox, Sender
from swarm_node.work.worker import Worker

log = logging.getLogger(__name__)

Show = Callable[[Callable[[], AgentSnapshot]], Awaitable[None]]

FINAL_SEND_S = 10.0
"""Longest wait for the verdicts of the last rollouts at the end of the round."""


@dataclass(frozen=True)
class AgentSettings:
    """Settings of an agent, chosen by the owner."""

    member: member.MemberSettings
    groups_per_request: int
    engine_command: Choose
    threads: int = 1
    """Threads of the engine; other load on the machine belongs to other programs."""
    show: Show | None = None
    """Draws the live view, if there is a terminal."""


@dataclass(frozen=True)
class RunEarnings:
    """Totals of a run of the agent."""

    accepted: int
    rejected: dict[str, int]
    tokens: int
    credit_micros: int
    unit: dict[str, Any]
    """The unit of which `credit_micros` are the millionths: its name and decimals."""


async def run(settings: AgentSettings) -> RunEarnings:
    """Take part in a round until it is finished, a signal arrives, or the owner stops the agent."""
    home = settings.member.home
    async with open_member(settings.member) as me:
        stopped.forget(home)
        try:
            earnings, said = await _work(settings, me)
        except* SwarmError as group:
            error = next(leaves(group))
            await trio.to_thread.run_sync(stopped.record_end, home, error)
            raise error from None
        stopped.record_end(home, None, said)
        return earnings


async def _work(settings: AgentSettings, me: Member) -> tuple[RunEarnings, str]:
    """Work until the end; return the totals and the reason of the end."""
    governor = Governor(
        settings.member.home,
        me.uploads,
        price=settings.member.price_micros_per_mtok,
        given=dict(settings.member.limits),
        threads=settings.threads,
    )
    outbox = Outbox(me.folder / "outbox")
    sender = Sender(me.coordinator, outbox, Claims(me.folder / "claims"), Refusals(me.folder / FOLDER))
    notices = Notices(me.coordinator, me.folder)
    said = "a signal"
    async with open_engine(settings.engine_command, log=None) as engine, trio.open_nursery() as nursery:
        teller = ProgressReporter(me.coordinator, me.key, settings.member.join.round_id)
        worker = Worker(
            coordinator=me.coordinator,
            policies=me.policies,
            engine=engine,
            outbox=outbox,
            leased=Leased(me.folder),
            sender=sender,
            teller=teller,
            gate=governor,
            key=me.key,
            round_id=settings.member.join.round_id,
            groups_per_request=settings.groups_per_request,
            price_floor=lambda: governor.limits.price_floor,
        )
        pulse = Pulse(me, worker)
        agent = Agent(me, pulse, worker, sender, outbox, notices, governor, now_ms())
        nursery.start_soon(cancel_on_signal, me.signals, nursery.cancel_scope)
        async with listening(settings.member.home, governor, lambda: agent.snapshot().to_json()):
            nursery.start_soon(partial(governor.run, watch_cards=settings.show is not None))
            if settings.show is not None:
                nursery.start_soon(settings.show, agent.snapshot)
            await first_of(partial(_register, pulse, me), governor.leaving.wait)
            for machine in (pulse, me.policies, me.log_watch, sender.guard, worker, notices):
                nursery.start_soon(machine.run)
            if me.mapper is not None:
                nursery.start_soon(me.mapper.run)
            nursery.start_soon(pulse.listen)
            nursery.start_soon(sender.run, worker.take_turns)
            nursery.start_soon(teller.run, worker.drop)
            nursery.start_soon(_let_go, governor, worker)
            await first_of(worker.finished.wait, governor.leaving.wait)
            said = "stopped by `swarm-node leave`" if governor.leaving.is_set() else "finished, as you requested"
            said = said if governor.leaving.is_set() or governor.finishing else "the round is finished"
            log.info("leaving: %s", said)
            await _drain(sender, outbox)
            with suppress(SwarmError):  # the round is over, whether or not this still arrives
                await pulse.beat()
            nursery.cancel_scope.cancel()
    record_speed(me.folder, worker.tokens_per_s, now_ms())
    accepted = sender.verdicts.pop("accepted", 0) + sender.verdicts.pop("already_accepted", 0)
    unit = me.policies.unit.to_json()
    return RunEarnings(accepted, dict(sender.verdicts), sender.tokens, sender.credit_micros, unit), said


async def _register(pulse: Pulse, me: Member) -> None:
    await pulse.register()
    me.record_joined()


async def _let_go(governor: Governor, worker: Worker) -> None:
    """Return the running leases whenever a limit takes effect at once."""
    while True:
        if governor.decision.at_once and worker.open_leases:
            await worker.let_go()
        await governor.changes()


async def _drain(sender: Sender, outbox: Outbox) -> None:
    """Wait until the last rollouts are sent, for at most `FINAL_SEND_S`."""
    with trio.move_on_after(FINAL_SEND_S):
        while len(outbox):
            sender.wake()
            await trio.sleep(0.1)


def leaves(group: BaseExceptionGroup[SwarmError]) -> Iterator[SwarmError]:
    """Yield the errors in nested exception groups."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from leaves(error)
        else:
            yield error
