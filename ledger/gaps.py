"""Gaps: a log that was resumed from a copy which lacks its last published entries, by the word of the root keys.

    x-echo-swarm-resumed: {"size": 1200, "root": "<hex>", "lost_size": 1216}      in `signed` of root document k

- The document says: the log goes on from its first `size` entries, whose root is `root`. Entries that were published
  after them under the ledger's former keys are lost; as far as its signers know, those before `lost_size`.
- Only root keys can say so, each time by a new root document, which everybody gets and the log names in its next entry.
  The document names a ledger key that no document before it named: so every checkpoint tells on which side of the gap
  it was signed, and two of different sides are no fork where they differ after `size`.
- What was signed before a gap and is longer than `size` counts as its first `size` entries from then on. A checkpoint
  that is not longer must be continued as always.
- Receipts of lost entries stay proofs of what was published.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ledger.checkpoint import Checkpoint, ledger_key, open_checkpoint
from ledger.note import NoteKey, parse
from ledger.tree import TREE_SIZE_MAX
from protocol.errors import CheckpointInvalid, UntrustedMetadata
from protocol.policy import trust


@dataclass(frozen=True)
class Gap:
    """What one root document says of a gap."""

    root_version: int
    size: int
    """Entries that were kept."""
    root: bytes
    """Theirs."""
    lost_size: int
    """Entries that were published, as far as the signers know."""

    def __str__(self) -> str:
        lost = f"entries {self.size} to {self.lost_size - 1}" if self.lost_size > self.size else "none that are known"
        return f"root {self.root_version} resumes the log after its first {self.size} entries; lost are {lost}"


class Keys:
    """A round's chain of roots, as far as the log is read by it: its keys, and the gaps between them."""

    def __init__(self, roots: Sequence[bytes], round_id: str) -> None:
        chain = trust.ledger_roots(roots, round_id)
        self._first: dict[bytes, int] = {}
        self.gaps: list[Gap] = []
        for number, (public, resumed) in enumerate(chain, 1):
            is_new = public not in self._first
            self._first.setdefault(public, number)
            if resumed is not None:
                self.gaps.append(_gap(number, resumed))
                if not is_new:
                    raise UntrustedMetadata(f"Root {number} resumes the log, and names a ledger key of before.")
            elif not is_new and any(self._first[public] < gap.root_version for gap in self.gaps):
                raise UntrustedMetadata(f"Root {number} names a ledger key of before a gap.")
        self.newest_first = [ledger_key(round_id, public) for public in reversed(self._first)]

    def signed(self, note: bytes) -> tuple[Checkpoint, NoteKey]:
        """What a note says, and the newest of the ledger's keys that has signed it."""
        for key in self.newest_first:
            if parse(note).signature_by(key):
                return open_checkpoint(note, [key]), key
        return open_checkpoint(note, self.newest_first), self.newest_first[0]  # raises what is wrong with it

    def between(self, one: NoteKey, other: NoteKey) -> Gap | None:
        """The smallest log that was resumed from between two keys; None if none was."""
        earlier, later = sorted((self._first[one.public], self._first[other.public]))
        gaps = [gap for gap in self.gaps if earlier < gap.root_version <= later]
        return min(gaps, key=lambda gap: gap.size, default=None)

    def open(self, note: bytes) -> tuple[Checkpoint, Gap | None]:
        """What a note says, by whichever key; and the gap since, if it took entries that the note covers."""
        found, key = self.signed(note)
        gap = self.between(key, self.newest_first[0])
        return found, gap if gap and gap.size < found.size else None

    def counts_as(self, note: bytes) -> Checkpoint:
        """The part of what a note says that the log still begins with."""
        found, gap = self.open(note)
        return Checkpoint(found.origin, gap.size, gap.root) if gap else found

    def without_lost(self, notes: Iterable[bytes]) -> tuple[bytes, ...]:
        """Those of some notes that cover no lost entry; one that cannot be opened is left to whoever opens it."""
        return tuple(note for note in notes if not self._covers_lost(note))

    def _covers_lost(self, note: bytes) -> bool:
        try:
            return self.open(note)[1] is not None
        except CheckpointInvalid:
            return False


def _gap(number: int, field: object) -> Gap:
    if isinstance(field, dict) and set(field) == {"size", "root", "lost_size"}:
        size, root, lost_size = field["size"], field["root"], field["lost_size"]
        are_sizes = all(type(one) is int and 0 <= one <= TREE_SIZE_MAX for one in (size, lost_size))
        if are_sizes and lost_size >= size and isinstance(root, str) and len(root) == 64:
            try:
                return Gap(number, size, bytes.fromhex(root), lost_size)
            except ValueError:
                pass
    raise UntrustedMetadata(f"Root {number} speaks of a gap in the log, and what it says is not understood.")
