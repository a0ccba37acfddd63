"""Calls to witnesses that wait to be asked: C2SP's tlog-witness (`ledger.witness` has the format).

- The newest published checkpoint is sent with the proof that it continues the last one which this witness signed. What
  it answers is checked and recorded like a note that a witness sends by itself (`transactions.witnesses`).
- Nothing waits for a witness: the log is published before, and each witness is called by a task of its own.
- A witness that says that another size is its last one (409) is sent the proof from there, once in a call.
- An answer is read up to the size of a note, within `CALL_S`; redirects are not followed.
- A failure is logged when it begins, when its kind changes, and when it is over.
"""

import logging
from typing import NamedTuple

import aiohttp
import sqlalchemy as sa

from coordinator.base.clock import now_ms
from coordinator.service.round import Round
from coordinator.transactions import witnesses
from ledger import store
from ledger.checkpoint import read_saved
from ledger.gaps import Keys
from ledger.note import NOTE_MAX_BYTES, NoteKey
from ledger.tables import cosignatures_table
from ledger.witness import PATH, SIZE_MAX_BYTES, AddCheckpoint, parse_size
from protocol.errors import MalformedMessage, RolledBack, SwarmError, Unreachable

log = logging.getLogger(__name__)

CALL_EVERY_S = 60.0
"""Time between two calls: C2SP's witnesses expect no more than a few a minute from one log."""

CALL_S = 10.0

AGAIN_S = 3600
"""Age of a signature at which the same checkpoint is sent again, so that readers see that the witness is alive."""

USER_AGENT = "echo-swarm-coordinator"

REASONS = {
    403: "It does not know this ledger's key: send it to its owner.",
    404: "It does not know this log: send the ledger's key to its owner.",
    422: "It has signed another history of this log. Keep your store, and find out who else has the ledger's key.",
}
"""Statuses of tlog-witness, and what they mean for an operator."""


class _Answer(NamedTuple):
    status: int
    body: bytes


class WitnessCaller:
    """The calls to one witness."""

    def __init__(self, round_: Round, key: NoteKey, address: str) -> None:
        self._round, self._key, self._address = round_, key, address
        self._trouble = ""
        self.patience_s = CALL_S

    async def call(self) -> None:
        """Send the newest checkpoint, unless this witness has just signed it; log what fails."""
        try:
            outcome = await self._call()
        except SwarmError as error:
            kind = error.message if isinstance(error, Unreachable) else error.code  # other messages have sizes
            if kind != self._trouble:
                log.warning("witness=%s has not signed code=%s: %s", self._key.name, error.code, error)
            self._trouble = kind
            return
        if outcome and self._trouble:
            log.info("witness=%s signs again", self._key.name)
        if outcome:
            self._trouble = ""

    async def _call(self) -> str:
        """Return the outcome of a call; empty if there is nothing to sign."""
        note = await self._round.database.read(store.checkpoint)
        if note is None:
            return ""
        size = read_saved(note).size
        old, time_s = await self._round.database.read(_last, self._key)
        if old == size and time_s > now_ms() // 1000 - AGAIN_S:
            return ""
        limit = aiohttp.ClientTimeout(total=self.patience_s)
        async with aiohttp.ClientSession(timeout=limit, trust_env=True, auto_decompress=False) as session:
            answer = await self._ask(session, note, min(old, size), size)
            if answer.status == 409:  # asked again on the same connection, if the witness keeps it
                old = parse_size(answer.body[:SIZE_MAX_BYTES])
                if old > size:
                    raise RolledBack(
                        f"It has signed {old} entries, and this log has {size}.",
                        hint="If the log was resumed after a gap, its owner must run `swarm-node ledger witness` once.",
                    )
                answer = await self._ask(session, note, old, size)
        if answer.status != 200:
            why = REASONS.get(answer.status, "Ask its owner for the reason.")
            raise Unreachable(f"It answers with status {answer.status}.", hint=why)
        reply = await self._round.database.run(
            witnesses.record_signature,
            note + answer.body,
            keys=Keys(self._round.roots, self._round.round_id),
            witnesses=[self._key],
            now_ms=now_ms(),
        )
        return reply.outcome

    async def _ask(self, session: aiohttp.ClientSession, note: bytes, old: int, size: int) -> _Answer:
        proof = await self._round.database.read(store.prove_growth, old, size)
        body = AddCheckpoint(old, tuple(proof), note).to_bytes()
        headers = {
            "Content-Type": "text/plain; charset=utf-8",
            "User-Agent": USER_AGENT,
            "Accept-Encoding": "identity",
        }
        try:
            async with session.post(
                f"{self._address}/{PATH}", data=body, headers=headers, allow_redirects=False
            ) as answer:
                data = b""
                async for part in answer.content.iter_chunked(NOTE_MAX_BYTES):
                    data += part
                    if len(data) > NOTE_MAX_BYTES:
                        raise MalformedMessage(f"It answers with more than {NOTE_MAX_BYTES} bytes.")
                return _Answer(answer.status, data)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Unreachable(f"It cannot be reached: {type(error).__name__}.") from None


def callers(round_: Round) -> list[WitnessCaller]:
    """Return a caller for each witness of a round that has an address."""
    return [WitnessCaller(round_, key, address) for key, address in round_.config.ledger.addresses.items()]


def _last(connection: sa.Connection, key: NoteKey) -> tuple[int, int]:
    """Return the size and the time of the last note of a witness; zeros without one."""
    cols = cosignatures_table.c
    row = connection.execute(sa.select(cols.size, cols.time_s).where(cols.witness == str(key))).first()
    return (row.size, row.time_s) if row is not None else (0, 0)
