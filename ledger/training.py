"""The chain of a round's updates in the log: what each was made of, and that each begins where the last one ended.

    batch 1     update 1: start  → A      groups_root of batch 1
    batch 2     update 2: A      → B      groups_root of batch 2
                update 2: A      → C      attempt 2: made again, with another result
                update 3: C      → D

- A *state* is everything that the next update depends on: weights, the optimizer's moments and steps, random numbers.
  Its root is that of an RFC 6962 tree with one leaf for each tensor (`coordinator.learner.checkpoint`).
- The root of a batch's groups is that of the same tree with one leaf for each group, in the order of the batch: the
  canonical bytes of a `TrainingGroup`. It is logged when the batch is formed, before the learner gets it.
- The state before an update is the one after the last attempt at the update before it. The only exception is a version
  that the operator put in its place: the entry names it.
- A *retraction* says that batches `first` to `last` (not before `first`) were trained on again without the groups of
  some owners, and which version has the result. It comes after the entry of that version, with no later version
  between, and batch `last` is in the log.
- Its `before` is the `after` of the last attempt at update `first` - 1, or of a retraction whose `last` that is, or the
  `before` of the last attempt at update `first`; if there is none of these, it is any.
- An update whose `replaced_by` is the retraction's version is `last` + 1, and begins with its `after`.
- If batch `last` + 1 comes after the retraction, the `replaced_by` of each update of it is this version or a later one,
  unless an earlier update begins with a later one. Update `last` may then have no entry.
- **Which updates may be replayed** is drawn from the log: update u by the log's root before the entry of batch u + 2,
  which is formed when u has its entry (`is_drawn`), and by the settings in that entry. What a replay needs of it is
  kept and served.
- The first entry may be of any update: the software of an older round made none.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256

from ledger import tree
from ledger.entry import Entry, FormedBatch, RetractionEntry, UpdateEntry, Version
from ledger.tree import leaf_hash
from protocol.errors import ProofInvalid


def groups_root(groups: Iterable[bytes]) -> str:
    """Return the root of a batch from the canonical bytes of its groups, as hex digits."""
    return tree.root_of([leaf_hash(group) for group in groups]).hex()


LATER = 2
"""Update u is drawn when batch u + `LATER` is formed: the learner asks for that batch after its commitment to u."""

_DRAW = 2**64


def is_drawn(root: bytes, update: int, one_in: int) -> bool:
    """Return True if one of `one_in` updates must be kept, and this is one; `root` is the log's before the draw."""
    ticket = int.from_bytes(sha256(b"echo-swarm/kept-update\0" + root + update.to_bytes(8, "big")).digest()[:8], "big")
    return ticket * one_in < _DRAW if one_in else False


@dataclass(frozen=True)
class TrainingSummary:
    """Totals of the updates in the log."""

    first: int = 0
    """The first update that has an entry; 0 if none has one."""
    last: int = 0
    repeated: int = 0
    """Number of entries that repeat an earlier update."""
    replaced: tuple[int, ...] = ()
    """Versions that the operator put in the place of a state."""
    settings: tuple[tuple[int, str], ...] = ()
    """Each update from which on the settings are others, with their digest."""
    retractions: tuple[RetractionEntry, ...] = ()


@dataclass
class TrainingChain:
    """The updates in the log so far; an entry that does not continue them is refused."""

    updates: dict[int, UpdateEntry] = field(default_factory=dict)
    """The last attempt at each update."""
    places: dict[int, int] = field(default_factory=dict)
    """The indexes of these entries."""
    formed: dict[int, int] = field(default_factory=dict)
    """The index of each batch's entry."""
    promised: dict[int, UpdateEntry] = field(default_factory=dict)
    """The entry that each update had when it could be drawn: its settings say how many are kept."""
    retractions: dict[int, RetractionEntry] = field(default_factory=dict)
    """The retractions by the version that has the result."""
    _due: dict[int, int] = field(default_factory=dict)
    """The version of the retraction that each batch was formed after, if it ends with the update before."""
    _batches: dict[int, FormedBatch] = field(default_factory=dict)
    _versions: int = 0
    _repeated: int = 0
    _replaced: list[int] = field(default_factory=list)
    _settings: list[tuple[int, str]] = field(default_factory=list)

    def add(self, index: int, entry: Entry) -> None:
        """Add an entry of the log; raise `ProofInvalid` if it breaks the chain of updates."""
        if isinstance(entry, Version):
            self._versions = entry.version
        elif isinstance(entry, FormedBatch):
            self._batches[entry.number], self.formed[entry.number] = entry, index
            ending = [each.version for each in self.retractions.values() if each.last == entry.number - 1]
            self._due[entry.number] = max(ending, default=0)
            if (made := self.updates.get(entry.number - LATER)) is not None:
                self.promised[made.update] = made
        elif isinstance(entry, RetractionEntry):
            if problem := self._retraction_problem(entry):
                raise ProofInvalid(f"Entry {index} cannot be the retraction of version {entry.version}: {problem}")
            self.retractions[entry.version] = entry
        elif isinstance(entry, UpdateEntry):
            if problem := self.problem(entry):
                raise ProofInvalid(f"Entry {index} cannot be update {entry.update}: {problem}")
            self._repeated += entry.attempt > 1
            if entry.replaced_by:
                self._replaced.append(entry.replaced_by)
            if not self._settings or self._settings[-1][1] != entry.settings_digest:
                self._settings.append((entry.update, entry.settings_digest))
            self.updates[entry.update], self.places[entry.update] = entry, index

    def problem(self, entry: UpdateEntry) -> str:
        """Return why an entry does not continue the chain; empty if it does."""
        batch = self._batches.get(entry.update)
        was_logged = bool(self._batches) and entry.update >= min(self._batches)
        return link_problem(
            entry,
            last=self.updates.get(entry.update),
            previous=self.updates.get(entry.update - 1),
            batch=batch,
            batch_expected=was_logged,
            is_first=not self.updates,
            versions=self._versions,
            retraction=self.retractions.get(entry.replaced_by),
            due=self._due.get(entry.update, 0),
            loaded=max(self._replaced, default=0),
        )

    def _retraction_problem(self, entry: RetractionEntry) -> str:
        """Return why a retraction does not begin with a state of the chain; empty if it does."""
        return retraction_problem(
            entry,
            previous=self.updates.get(entry.first - 1),
            replaced=self.updates.get(entry.first),
            earlier=tuple(self.retractions.values()),
            version=self._versions,
            batch=self._batches.get(entry.last),
        )

    @property
    def summary(self) -> TrainingSummary:
        updates = self.updates
        ends = (min(updates), max(updates)) if updates else (0, 0)
        return TrainingSummary(
            *ends,
            self._repeated,
            replaced=tuple(self._replaced),
            settings=tuple(self._settings),
            retractions=tuple(self.retractions.values()),
        )


def link_problem(
    entry: UpdateEntry,
    *,
    last: UpdateEntry | None,
    previous: UpdateEntry | None,
    batch: FormedBatch | None,
    batch_expected: bool,
    is_first: bool,
    versions: int,
    retraction: RetractionEntry | None = None,
    due: int = 0,
    loaded: int = 0,
) -> str:
    """Return why an entry does not follow from those before it; empty if it does.

    `last` is the last attempt at this update, `previous` at the one before; `versions` is the last published version,
    and `retraction` the one whose result is the version that `entry` begins with. `due` is the version of the last
    retraction that ends with the update before and has its entry before this update's batch. `loaded` is the last
    version that an earlier entry begins with. Both are 0 if there is none.
    """
    if entry.attempt != (last.attempt if last else 0) + 1:
        return f"it is attempt {entry.attempt}, and attempt {(last.attempt if last else 0) + 1} would be the next."
    if retraction is not None and entry.update != retraction.last + 1:
        return f"it begins with version {entry.replaced_by}, whose retraction ends with update {retraction.last}."
    if entry.replaced_by < due and loaded <= due:
        return f"it does not begin with version {due}, the result of a retraction up to update {entry.update - 1}."
    is_after_retraction = retraction is not None or 0 < due <= entry.replaced_by
    if previous is None and last is None and not is_after_retraction and not is_first:
        return f"update {entry.update - 1} is not in the log: an update was skipped."
    if entry.replaced_by > versions:
        return f"it begins with version {entry.replaced_by}, which is not in the log."
    expected = previous.after if previous else last.before if last else entry.before
    if retraction is not None and entry.before != retraction.after:
        return (
            f"it begins with the state {entry.before[:16]}…, but the retraction of version {entry.replaced_by} ended "
            f"with {retraction.after[:16]}…: other weights were put in its place."
        )
    if not entry.replaced_by and entry.before != expected:
        return (
            f"it begins with the state {entry.before[:16]}…, but the one before it ended with {expected[:16]}…: "
            "the weights or the optimizer were changed in between."
        )
    if batch is None and batch_expected:
        return f"batch {entry.update} was never formed."
    if batch is not None and entry.groups_root != batch.groups_root:
        return (
            f"it was trained on {entry.groups_root[:16]}…, but batch {entry.update} was formed as "
            f"{batch.groups_root[:16]}…: groups or rewards were changed after that."
        )
    return ""


def retraction_problem(
    entry: RetractionEntry,
    *,
    previous: UpdateEntry | None,
    replaced: UpdateEntry | None,
    earlier: Iterable[RetractionEntry],
    version: int,
    batch: FormedBatch | None,
) -> str:
    """Return why a retraction does not follow from the entries before it; empty if it does.

    `previous` is the last attempt at the update before its first, `replaced` at its first, `earlier` are the
    retractions before it, `version` is the last published version, and `batch` the batch of its last update.
    """
    if entry.version != version:
        return f"the last version in the log is {version}."
    if entry.last < entry.first:
        return f"it goes from update {entry.first} back to update {entry.last}."
    if batch is None:
        return f"batch {entry.last} was never formed."
    states = {each.after for each in earlier if each.last == entry.first - 1}
    states |= {previous.after} if previous else set()
    states |= {replaced.before} if replaced else set()
    if states and entry.before not in states:
        return f"it begins with the state {entry.before[:16]}…, which is none after update {entry.first - 1}."
    return ""
