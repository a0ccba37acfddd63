"""Gaps: a log that was resumed from a copy without its last published entries, as signed by the root keys.

    x-echo-swarm-resumed: {"size": 1200, "root": "<hex>", "lost_size": 1216}      in `signed` of root document k

- The document says: the log continues after its first `size` entries, whose root is `root`. Entries that were published
  after them under the ledger's former keys are lost; as far as its signers know, those before `lost_size`.
- Only root keys can declare a gap, each time by a new root document, which everybody gets and the log names in its next
  entry. The document names a new ledger key: so the key of every checkpoint shows on which side of the gap it was
  signed, and two from different sides are no fork if they differ after `size`.
- A root document with other members in the field, a `size` above `lost_size`, a ledger key from before, or one from
  before that comes back later makes the chain `untrusted_metadata`. Roots after it do not repeat the field.
- A checkpoint signed before a gap that is longer than `size` counts as its first `size` entries from then on; after
  several gaps the smallest `size` counts. The log must continue a checkpoint that is not longer, as always. So a node
  that saw a longer log accepts the shorter one once; without a gap it is `rolled_back`.
- A witness's note that covers lost entries vouches for nothing; the coordinator answers it with `stale`.
- The `root` entry of the document follows the first `size` entries, behind those of earlier documents whose entries
  were lost, too.
- Receipts of lost entries still prove what was published.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ledger.checkpoint import Checkpoint, ledger_key, open_checkpoint
from ledger.note import NoteKey, parse
from ledger.tree import TREE_SIZE_MAX
from protocol.errors import CheckpointInvalid, UntrustedMetadata


@dataclass(frozen=True)
class Gap:
    """A gap, as a root document declares it."""

    root_version: int
    size: int
    """The number of entries that were kept."""
    root: bytes
    """The root of the kept entries."""
    lost_size: int
    """The number of entries that were published, as far as the signers know."""

    def __str__(self) -> str:
        lost = f"entries {self.size} to {self.lost_size - 1}" if self.lost_size > self.size else "no known entries"
        return f"root {self.root_version} resumes the log after its first {self.size} entries; lost: {lost}"


class Keys:
    """The ledger's keys in a round's chain of roots, and the gaps between them."""

    def __init__(self, roots: Sequence[bytes], round_id: str) -> None:
        from protocol.policy.trust import ledger_roots

        chain = ledger_roots(roots, round_id)
        self._first: dict[bytes, int] = {}
        self.gaps: list[Gap] = []
        for number, (public, resumed) in enumerate(chain, 1):
            is_new = public not in self._first
            self._first.setdefault(public, number)
            if resumed is not None:
                self.gaps.append(_gap(number, resumed))
                if not is_new:
                    raise UntrustedMetadata(f"Root {number} resumes the log, but names an old ledger key.")
            elif not is_new and any(self._first[public] < gap.root_version for gap in self.gaps):
                raise UntrustedMetadata(f"Root {number} names a ledger key from before a gap.")
        self.newest_first = [ledger_key(round_id, public) for public in reversed(self._first)]

    def signed(self, note: bytes) -> tuple[Checkpoint, NoteKey]:
        """Return a note's checkpoint, and the newest of the ledger's keys that has signed it."""
        for key in self.newest_first:
            if parse(note).signature_by(key):
                return open_checkpoint(note, [key]), key
        return open_checkpoint(note, self.newest_first), self.newest_first[0]  # raises the note's error

    def between(self, first: NoteKey, second: NoteKey) -> Gap | None:
        """Return the gap between two keys that kept the fewest entries; None if there is no gap between them."""
        earlier, later = sorted((self._first[first.public], self._first[second.public]))
        gaps = [gap for gap in self.gaps if earlier < gap.root_version <= later]
        return min(gaps, key=lambda gap: gap.size, default=None)

    def open(self, note: bytes) -> tuple[Checkpoint, Gap | None]:
        """Return a note's checkpoint, signed by any key, and a later gap if it lost entries that the note covers."""
        checkpoint, key = self.signed(note)
        gap = self.between(key, self.newest_first[0])
        return checkpoint, gap if gap and gap.size < checkpoint.size else None

    def counts_as(self, note: bytes) -> Checkpoint:
        """Return the part of a note's checkpoint with which the log still begins."""
        checkpoint, gap = self.open(note)
        return Checkpoint(checkpoint.origin, gap.size, gap.root) if gap else checkpoint

    def without_lost(self, notes: Iterable[bytes]) -> tuple[bytes, ...]:
        """Return the notes that cover no lost entry; an invalid note is kept, so that its reader reports the error."""
        return tuple(note for note in notes if not self._covers_lost(note))

    def _covers_lost(self, note: bytes) -> bool:
        try:
            return self.open(note)[1] is not None
        except CheckpointInvalid:
            return False


def _gap(number: int, field: object) -> Gap:
    if isinstance(field, dict) and set(field) == {"size", "root", "lost_size"}:
        size, root, lost_size = field["size"], field["root"], field["lost_size"]
        are_sizes = all(type(value) is int and 0 <= value <= TREE_SIZE_MAX for value in (size, lost_size))
        if are_sizes and lost_size >= size and isinstance(root, str) and len(root) == 64:
            try:
                return Gap(number, size, bytes.fromhex(root), lost_size)
            except ValueError:
                pass
    raise UntrustedMetadata(f"Root {number} declares a gap in the log, but its declaration is invalid.")
