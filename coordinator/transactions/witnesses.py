"""What the round's witnesses have signed: taken from whoever brings it, checked, kept, and shown to all.

1. The note is a checkpoint of this round, signed by one of the ledger's keys: nothing else is looked at further.
2. A witness whom the operator named has signed it, and not with a time to come.
3. It is the beginning of the log as it is here. If it is not, the ledger's key has signed two histories: somebody else
   has it, or this store was restored from too old a copy. That is refused, and the operator told.
4. It is not older than what this witness sent before, by its size or its time: an old word replaces none.

- Of each witness the last word is kept, with no lines but the log's and its own: nobody hangs anything on it.
- Bringing the same again is harmless; whoever brings it need not be the witness.
"""

import logging
from collections.abc import Collection, Sequence

import sqlalchemy as sa

from ledger import note, store, witness
from ledger.gaps import Keys
from ledger.note import Note, NoteKey
from ledger.tables import cosignatures_table
from ledger.witness import CosignatureReply, Cosigned, Vouched
from protocol import limits
from protocol.errors import LedgerForked, NotWitnessed, RequestExpired

log = logging.getLogger(__name__)

_here = cosignatures_table.c


def record_signature(
    connection: sa.Connection, data: bytes, *, keys: Keys, witnesses: Collection[NoteKey], now_ms: int
) -> CosignatureReply:
    """Keep what a witness has signed; what covers entries that a gap took is an old word."""
    found = witness.vouched([data], keys.newest_first, witnesses)
    if not found:
        raise NotWitnessed(
            "None of this round's witnesses has signed this checkpoint.",
            hint="Ask the operator to name the key in ledger.witnesses.",
        )
    if keys.open(data)[1]:
        return CosignatureReply(outcome="stale")
    outcomes = {_take_one(connection, one, keys.newest_first, now_ms) for one in found}
    return CosignatureReply(
        outcome=next(word for word in ("recorded", "already_recorded", "stale") if word in outcomes)
    )


def cosigned(connection: sa.Connection, witnesses: Collection[NoteKey]) -> Cosigned:
    """The last word of each witness that is still named."""
    return Cosigned(notes=tuple(_kept(connection, witnesses).values()))


def checkpoint(connection: sa.Connection, witnesses: Collection[NoteKey]) -> bytes | None:
    """The last signed checkpoint, with the lines of those who have signed that very one; None before the first."""
    data = store.checkpoint(connection)
    if data is None:
        return None
    last = note.parse(data)
    lines = last.signatures
    for key, kept in _kept(connection, witnesses).items():
        other = note.parse(kept)
        if other.text == last.text and (line := other.signature_by(key)):
            lines = (*lines, line)
    return Note(last.text, lines).to_bytes()


def _take_one(connection: sa.Connection, one: Vouched, keys: Sequence[NoteKey], now_ms: int) -> str:
    said = one.checkpoint
    if one.time_s > now_ms // 1000 + limits.CLOCK_SKEW_MAX_S:
        raise RequestExpired(f"{one.key.name[:80]} has signed at a time to come.", hint="Set the witness's clock.")
    if said.size > store.size(connection) or store.root_at(connection, said.size) != said.root:
        log.error("the ledger's key signed a different log, with %d entries", said.size)
        raise LedgerForked(
            f"These {said.size} entries, signed with the ledger's key, are not the first of this log.",
            hint="Somebody else has the key, or the store is older than what was published. Keep this note.",
        )
    before = connection.execute(sa.select(cosignatures_table).where(_here.witness == str(one.key))).first()
    if before is not None and (said.size, one.time_s) == (before.size, before.time_s):
        return "already_recorded"
    if before is not None and (said.size < before.size or one.time_s < before.time_s):
        return "stale"
    row = {"size": said.size, "time_s": one.time_s, "note": _bare(one, keys)}
    if before is None:
        connection.execute(sa.insert(cosignatures_table).values(witness=str(one.key), **row))
    else:
        connection.execute(sa.update(cosignatures_table).where(_here.witness == str(one.key)).values(**row))
    return "recorded"


def _bare(one: Vouched, keys: Sequence[NoteKey]) -> bytes:
    """The note with two lines: the log's and the witness's."""
    found = note.parse(one.note)
    ours = next(line for key in keys if (line := found.signature_by(key)))
    theirs = found.signature_by(one.key)
    assert theirs is not None
    return Note(found.text, (ours, theirs)).to_bytes()


def _kept(connection: sa.Connection, witnesses: Collection[NoteKey]) -> dict[NoteKey, bytes]:
    named = {str(key): key for key in witnesses}
    rows = connection.execute(sa.select(_here.witness, _here.note).where(_here.witness.in_(named)))
    return {named[row.witness]: bytes(row.note) for row in rows}
