"""The learner's commitments to its updates, as entries of the ledger.

- An entry must continue the chain of updates (`ledger.training`), as every reader of the log checks. A commitment that
  does not is refused: an honest learner then stops, instead of leaving a log that proves it wrong.
- The same commitment again changes nothing: a learner that resumed repeats what it did after its checkpoint. Another
  result of the same update is a further attempt, which everybody sees.
- The settings are stored by their digest, for whoever replays an update.
"""

import json
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from coordinator.store.facts import Fact, get_fact, set_fact
from coordinator.store.tables import rollouts
from coordinator.transactions import batches, policy_versions
from ledger import store
from ledger.entry import FormedBatch, RetractionEntry, UpdateEntry
from ledger.training import LATER, is_drawn, link_problem
from protocol import limits
from protocol.errors import OutOfOrder
from protocol.policy import chunks
from protocol.work.learning import KeptBatch, UpdateCommitment

COMMITTED = Fact("committed_update", 0)
"""The fact with the last update that has an entry."""

LOADED = Fact("loaded_version", 0)
"""The last version that an update in the ledger begins with, in place of the learner's state."""

RETRACTIONS = Fact[tuple[int, ...]]("retractions", ())
"""The versions that are results of retractions."""

DRAWN = Fact[Mapping[str, Any]]("drawn_updates", {"through": 0, "updates": ()})
"""The fact with the updates that were drawn to be kept, and the last one that was looked at."""


def record(connection: sa.Connection, commitment: UpdateCommitment, *, now_ms: int) -> bool:
    """Record a commitment in the ledger; return False if it is there already."""
    last = last_attempt(connection, commitment.update)
    entry = UpdateEntry(
        **commitment.model_dump(exclude={"settings"}),
        attempt=last.attempt + 1 if last else 1,
        settings_digest=chunks.digest(commitment.settings),
    )
    if last is not None and last == entry.model_copy(update={"attempt": last.attempt}):
        return False
    formed = store.find(connection, f"batch:{commitment.update}")
    problem = link_problem(
        entry,
        last=last,
        previous=last_attempt(connection, commitment.update - 1),
        batch=formed.entry if formed and isinstance(formed.entry, FormedBatch) else None,
        batch_expected=False,
        is_first=not get_fact(connection, COMMITTED),
        versions=policy_versions.newest_version(connection).version,
        retraction=retraction_to(connection, commitment.replaced_by),
        due=_due(connection, formed),
        loaded=get_fact(connection, LOADED),
    )
    if problem:
        raise OutOfOrder(
            f"Update {commitment.update} does not continue the ledger: {problem}",
            hint="Restore the learner's folder and the round from the same backup. Nothing was recorded.",
        )
    store.append(connection, entry, now_ms)
    set_fact(connection, COMMITTED, commitment.update)
    set_fact(connection, LOADED, max(get_fact(connection, LOADED), entry.replaced_by))
    set_fact(connection, _settings(entry.settings_digest), commitment.settings.decode())
    return True


def retraction_to(connection: sa.Connection, version: int) -> RetractionEntry | None:
    """Return the retraction whose result is this version; None if there is none."""
    recorded = store.find(connection, f"retraction:{version}")
    return recorded.entry if recorded and isinstance(recorded.entry, RetractionEntry) else None


def _due(connection: sa.Connection, formed: store.Recorded | None) -> int:
    """Return the version of the last retraction that ends before a batch and was entered before it; 0 if none."""
    if formed is None or not isinstance(formed.entry, FormedBatch):
        return 0
    due = 0
    for version in get_fact(connection, RETRACTIONS):
        recorded = store.find(connection, f"retraction:{version}")
        if recorded and isinstance(recorded.entry, RetractionEntry) and recorded.index < formed.index:
            due = version if recorded.entry.last == formed.entry.number - 1 else due
    return due


def last_attempt(connection: sa.Connection, update: int) -> UpdateEntry | None:
    """Return the last entry of an update; None if it has none."""
    found: UpdateEntry | None = None
    attempt = 1
    while recorded := store.find(connection, f"update:{update}:{attempt}"):
        assert isinstance(recorded.entry, UpdateEntry)
        found, attempt = recorded.entry, attempt + 1
    return found


def drawn(connection: sa.Connection, *, keeps: bool) -> tuple[int, ...]:
    """Return the updates that were drawn to be kept, after drawing those that can be drawn by now; none unless `keeps`.

    Each is drawn by the settings in its own entry, as readers do: the operator may have changed them since.
    """
    if not keeps:
        return ()
    now = get_fact(connection, DRAWN)
    known = dict(now)
    promises: dict[str, int] = {}
    update = through = int(known["through"])
    while (formed := store.find(connection, f"batch:{update + 1 + LATER}")) is not None:
        update += 1
        if (made := last_attempt(connection, update)) is None:
            continue
        if (digest := made.settings_digest) not in promises:
            promises[digest] = _promise(connection, digest)
        if promises[digest] and is_drawn(store.root_at(connection, formed.index), update, promises[digest]):
            known["updates"] = [*known["updates"], update][-limits.KEPT_UPDATES_MAX :]
    if update > through:
        set_fact(connection, DRAWN, {**known, "through": update})
    return tuple(known["updates"])


def drawn_before(connection: sa.Connection) -> tuple[int, ...]:
    """Return the updates that were drawn when the learner last asked; this changes nothing."""
    return tuple(get_fact(connection, DRAWN)["updates"])


def _promise(connection: sa.Connection, digest: str) -> int:
    """Return `kept_one_in` of settings; 0 if they have none."""
    values = json.loads(settings(connection, digest) or "{}")
    return int(values.get("kept_one_in", 0))


def kept_batch(connection: sa.Connection, number: int) -> KeptBatch:
    """Return a batch with the signed rollouts of its groups."""
    groups = batches.groups_of(connection, number)
    cols = rollouts.c
    rows = connection.execute(sa.select(cols.claim_id, cols.envelope).where(cols.batch == number))
    signed: dict[str, bytes] = dict(map(tuple, rows.all()))
    return KeptBatch(number=number, groups=groups, rollouts=tuple(signed[group.claim_id] for group in groups))


def settings(connection: sa.Connection, digest: str) -> str | None:
    """Return the settings with this digest, as JSON; None if they are unknown."""
    return get_fact(connection, _settings(digest)) or None


def _settings(digest: str) -> Fact[str]:
    return Fact(f"training_settings:{digest}", "")
