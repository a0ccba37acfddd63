"""Signatures of the round's witnesses: accepted from anybody, checked, stored, and shown to all.

1. The note is a checkpoint of this round, signed by one of the ledger's keys.
2. A witness whom the operator named has signed it, and not with a future time.
3. It is the beginning of this coordinator's log. If it is not, the ledger's key has signed two histories: somebody else
   has the key, or this store was restored from too old a copy. The note is refused, and the error is logged.
4. It is not older than the last note of this witness, by its size or its time: an older note replaces none.

- The last note of each witness is stored, with no lines but the log's and its own: nobody can add others to it.
- Sending the same note again is harmless; the sender need not be the witness.
"""

import logging
from collections.abc import Collection, Sequence

import sqlalchemy as sa

from ledger import note, store, witness
from ledger.gaps import Keys
from ledger.note import NOTE_MAX_BYTES, Note, NoteKey
from ledger.tables import cosignatures_table
from ledger.witness import CosignatureReply, Cosigned, Vouched
from protocol import limits
from protocol.errors import LedgerForked, NotWitnessed, RequestExpired

log = logging.getLogger(__name__)

_cols = cosignatures_table.c


def record_signature(
    connection: sa.Connection, data: bytes, *, keys: Keys, witnesses: Collection[NoteKey], now_ms: int
) -> CosignatureReply:
    """Record a note that a witness has signed; a note that covers entries lost in a gap is stale."""
    notes = witness.vouched([data], keys.newest_first, witnesses)
    if not notes:
        ours = {(key.name, key.id) for key in keys.newest_first}
        others = [line for line in note.parse(data).signatures if (line.name, line.key_id) not in ours]
        if not others:
            raise NotWitnessed("No witness has signed this checkpoint.", hint="Sign it: `swarm-node ledger witness`.")
        raise NotWitnessed(
            f"Your key {others[0].name[:80]} is not in the round's list of witnesses.",
            hint="Ask the operator to add it to ledger.witnesses; `swarm-node ledger witness` prints it.",
        )
    if keys.open(data)[1]:
        return CosignatureReply(outcome="stale")
    outcomes = {_take_one(connection, vouched, keys.newest_first, now_ms) for vouched in notes}
    return CosignatureReply(
        outcome=next(word for word in ("recorded", "already_recorded", "stale") if word in outcomes)
    )


def cosigned(connection: sa.Connection, witnesses: Collection[NoteKey]) -> Cosigned:
    """Return the last note of each witness that is still named."""
    return Cosigned(notes=tuple(_kept(connection, witnesses).values()))


def checkpoint(connection: sa.Connection, witnesses: Collection[NoteKey]) -> bytes | None:
    """Return the last signed checkpoint, with the lines of its witnesses; None before the first."""
    data = store.checkpoint(connection)
    if data is None:
        return None
    last = note.parse(data)
    lines = last.signatures
    for key, kept in _kept(connection, witnesses).items():
        other = note.parse(kept)
        if other.text == last.text and (line := other.signature_by(key)):
            longer = Note(last.text, (*lines, line))
            lines = longer.signatures if len(longer.to_bytes()) <= NOTE_MAX_BYTES else lines  # `cosigned` has it
    return Note(last.text, lines).to_bytes()


def _take_one(connection: sa.Connection, vouched: Vouched, keys: Sequence[NoteKey], now_ms: int) -> str:
    said = vouched.checkpoint
    if vouched.time_s > now_ms // 1000 + limits.CLOCK_SKEW_MAX_S:
        raise RequestExpired(f"{vouched.key.name[:80]} has signed with a future time.", hint="Set the witness's clock.")
    if said.size > store.size(connection) or store.root_at(connection, said.size) != said.root:
        log.error("the ledger's key signed a different log, with %d entries", said.size)
        raise LedgerForked(
            f"These {said.size} entries, signed with the ledger's key, are not the first of this log.",
            hint="Somebody else has the key, or the store is older than what was published. Keep this note.",
        )
    before = connection.execute(sa.select(cosignatures_table).where(_cols.witness == str(vouched.key))).first()
    if before is not None and (said.size, vouched.time_s) == (before.size, before.time_s):
        return "already_recorded"
    if before is not None and (said.size < before.size or vouched.time_s < before.time_s):
        return "stale"
    row = {"size": said.size, "time_s": vouched.time_s, "note": _bare(vouched, keys)}
    if before is None:
        connection.execute(sa.insert(cosignatures_table).values(witness=str(vouched.key), **row))
    else:
        connection.execute(sa.update(cosignatures_table).where(_cols.witness == str(vouched.key)).values(**row))
    return "recorded"


def _bare(vouched: Vouched, keys: Sequence[NoteKey]) -> bytes:
    """Return the note with two lines: the log's and the witness's."""
    parsed = note.parse(vouched.note)
    ours = next(line for key in keys if (line := parsed.signature_by(key)))
    theirs = parsed.signature_by(vouched.key)
    assert theirs is not None
    return Note(parsed.text, (ours, theirs)).to_bytes()


def _kept(connection: sa.Connection, witnesses: Collection[NoteKey]) -> dict[NoteKey, bytes]:
    named = {str(key): key for key in witnesses}
    rows = connection.execute(sa.select(_cols.witness, _cols.note).where(_cols.witness.in_(named)))
    return {named[row.witness]: bytes(row.note) for row in rows}
