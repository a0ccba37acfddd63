"""Messages to the owner about trouble and payouts: a command of the owner's gets each as JSON on its standard input.

1. Trouble that lasts for `HOLD_MS` causes one message, and one more when it has been over for as long.
2. A payout causes one message, and one line of the log, also without a command. What was paid before this node first
   looked causes none.
3. What was seen is saved before the command runs, so that a restart repeats no message that was accepted. A command
   that does not end with code 0 is run again after growing pauses, with the same `id`.
4. The command runs without a shell, and is killed after `COMMAND_S`. Its output is not logged: it may hold secrets.
"""

import json
import logging
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import trio
from pydantic import BaseModel, ConfigDict, ValidationError

from protocol.errors import SwarmError
from protocol.text.money import parse_unit
from swarm_node.base.clock import now_ms
from swarm_node.base.disk import write_durably
from swarm_node.owner.snapshot import AgentSnapshot

log = logging.getLogger(__name__)

FILE = "told.json"
LOOK_S = 15.0
HOLD_MS = 300_000
"""A coordinator that is launched again, or a router that restarts, is away for less."""
COMMAND_S = 60.0
PAUSE_MS, PAUSE_MAX_MS = 60_000, 3_600_000
WAITING_MAX = 20
"""Messages that wait; the oldest is dropped for a new one."""


class OwnerMessage(BaseModel):
    """A message to the owner."""

    model_config = ConfigDict(frozen=True)

    id: str
    kind: str
    """`trouble`, `over` or `payout`."""
    text: str
    at_ms: int
    node_id: str
    name: str
    coordinator: str


class ToldOwner(BaseModel):
    """The trouble and payouts that were seen and told, and the messages that wait for the command."""

    model_config = ConfigDict(frozen=True)

    round: str = ""
    """The beginning of the round's id: messages are counted in each round, and a node may move."""
    number: int = 0
    trouble: str = ""
    """The text of the trouble that stands, or stood until `gone_ms`."""
    since_ms: int = 0
    gone_ms: int = 0
    is_told: bool = False
    owner: str = ""
    """The owner whose payouts were seen; a node may get another one, who was paid for other nodes before."""
    payouts: int | None = None
    """Number of payouts; None before the first look."""
    paid_micros: int = 0
    waiting: tuple[OwnerMessage, ...] = ()


def observe(told: ToldOwner, seen: AgentSnapshot, now: int) -> ToldOwner:
    """Return the state after a look at the agent, with the new messages."""
    return _observe_payouts(_observe_trouble(told, seen, now), seen, now)


def _observe_trouble(told: ToldOwner, seen: AgentSnapshot, now: int) -> ToldOwner:
    trouble = seen.distrust or seen.trouble
    if trouble:
        since_ms = told.since_ms if told.trouble else now
        told = told.model_copy(update={"trouble": trouble, "since_ms": since_ms, "gone_ms": 0})
        if told.is_told or now - since_ms < HOLD_MS:
            return told
        return _with(told, seen, "trouble", trouble, now).model_copy(update={"is_told": True})
    if not told.trouble:
        return told
    if not told.is_told:
        return told.model_copy(update={"trouble": "", "since_ms": 0})
    if not told.gone_ms:
        return told.model_copy(update={"gone_ms": now})
    if now - told.gone_ms < HOLD_MS:
        return told
    over = _with(told, seen, "over", told.trouble, now)
    return over.model_copy(update={"trouble": "", "since_ms": 0, "gone_ms": 0, "is_told": False})


def _observe_payouts(told: ToldOwner, seen: AgentSnapshot, now: int) -> ToldOwner:
    if text := payout_text(told, seen):
        told = _with(told, seen, "payout", text, now)
    return _with_payouts_seen(told, seen)


def payout_text(told: ToldOwner, seen: AgentSnapshot) -> str:
    """Return the message about what was paid since the last look; empty if nothing was, or at an owner's first look."""
    if seen.rates is None or told.payouts is None or int(seen.rates["payouts"]) <= told.payouts:
        return ""
    if told.owner not in ("", seen.rates.get("owner", "")):
        return ""
    paid = parse_unit(seen.unit).exact(int(seen.rates["paid_micros"]) - told.paid_micros)
    return f"Paid: {paid}. `swarm-node ledger payouts` fetches the proof."


def _with_payouts_seen(told: ToldOwner, seen: AgentSnapshot) -> ToldOwner:
    if seen.rates is None:
        return told
    count, paid_micros = int(seen.rates["payouts"]), int(seen.rates["paid_micros"])
    owner = seen.rates.get("owner", "")
    return told.model_copy(update={"owner": owner, "payouts": count, "paid_micros": paid_micros})


def _with(told: ToldOwner, seen: AgentSnapshot, kind: str, text: str, now: int) -> ToldOwner:
    number = told.number + 1
    message = OwnerMessage(
        id=f"{seen.node_id[-8:]}-{told.round}-{number}", kind=kind, text=text, at_ms=now,
        node_id=seen.node_id, name=seen.name, coordinator=seen.coordinator,
    )  # fmt: skip
    return told.model_copy(update={"number": number, "waiting": (*told.waiting, message)[-WAITING_MAX:]})


class OwnerNotifier:
    """Logs each payout of one agent's owner, and runs the owner's command, if there is one, for each message."""

    def __init__(self, command: Sequence[str], folder: Path, snapshot: Callable[[], AgentSnapshot]) -> None:
        self._command, self._path, self._snapshot = list(command), folder / FILE, snapshot
        self.told = _load(self._path)
        self._next_ms = 0
        self._pause_ms = PAUSE_MS

    async def run(self) -> None:
        """Look and send at intervals until cancelled."""
        while True:
            try:
                await self.check(now_ms())
            except SwarmError as error:  # a full disk costs a repeated message after a restart, not the agent
                log.warning("cannot save which messages were sent code=%s: %s", error.code, error)
            await trio.sleep(LOOK_S)

    async def check(self, now: int) -> None:
        """Save and log what is new, then run the command for the messages that wait."""
        seen = self._snapshot()
        if text := payout_text(self.told, seen):
            log.info("%s", text)
        await self._save(observe(self.told, seen, now) if self._command else _with_payouts_seen(self.told, seen))
        while self._command and self.told.waiting and now >= self._next_ms:
            if not await self._is_accepted(self.told.waiting[0]):
                self._next_ms, self._pause_ms = now + self._pause_ms, min(2 * self._pause_ms, PAUSE_MAX_MS)
                return
            self._pause_ms = PAUSE_MS
            await self._save(self.told.model_copy(update={"waiting": self.told.waiting[1:]}))

    async def _is_accepted(self, message: OwnerMessage) -> bool:
        code: int | None = None
        try:
            with trio.move_on_after(COMMAND_S):
                ran = await trio.run_process(
                    self._command,
                    stdin=json.dumps(message.model_dump()).encode() + b"\n",
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    check=False,
                )
                code = ran.returncode
        except OSError as error:
            log.warning("the command of --notify cannot be started: %s", error.strerror)
            return False
        if code:
            log.warning("the command of --notify ended with code %d; message %s waits", code, message.id)
        elif code is None:
            log.warning("the command of --notify took more than %g s; message %s waits", COMMAND_S, message.id)
        return code == 0

    async def _save(self, told: ToldOwner) -> None:
        if told == self.told:
            return
        self.told = told
        data = told.model_dump_json().encode()
        await trio.to_thread.run_sync(partial(write_durably, self._path, data, temp_folder=self._path.parent))


def _load(path: Path) -> ToldOwner:
    try:
        return ToldOwner.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):  # missing, or of another release
        return ToldOwner(round=path.parent.name[:8])
