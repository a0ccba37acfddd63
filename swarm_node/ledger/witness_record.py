"""Record of what a witness has signed: the last note of each log, with the log's line and the witness's own.

- A note is signed only in the place of the one that its consistency was proved with, and saved before it is shown.
  The lock is held from the comparison to the save: two programs of one witness cannot sign two histories.
- Every way to sign goes through this record: the command that reads a round's log, and the server that logs call.
"""

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from ledger import note, witness
from ledger.checkpoint import Sign
from ledger.note import NOTE_MAX_BYTES, Note, NoteKey
from protocol.errors import ConfigInvalid
from swarm_node.base import disk
from swarm_node.base.disk import disk_named, write_durably


@dataclass(frozen=True)
class WitnessRecord:
    """The notes that one key has signed."""

    folder: Path
    key: NoteKey
    signature_of: Sign
    now_s: Callable[[], int]

    def find(self, origin: str) -> bytes | None:
        """Return the last note of a log that was signed; None before the first."""
        path = self._path(origin)
        return path.read_bytes() if path.exists() else None

    def sign(self, origin: str, after: bytes | None, log_key: NoteKey, data: bytes) -> bytes | None:
        """Sign a note that continues `after`, save and return it; None if another one was signed meanwhile."""
        busy = ConfigInvalid(f"Another program signs with {self.key.name[:80]}.", hint="Try again.")
        with disk_named(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        with disk.hold_lock(self.folder / "sign.lock", busy):
            if self.find(origin) != after:
                return None
            parsed = note.parse(data)
            line = parsed.signature_by(log_key)
            assert line is not None, "the caller has checked the log's signature"
            bare = Note(parsed.text, (line,)).to_bytes()
            signed = witness.cosign(bare, self.key, self.signature_of, self.now_s())
            assert len(signed) <= NOTE_MAX_BYTES
            write_durably(self._path(origin), signed, temp_folder=self.folder)
            return signed

    def by_hash(self, digest: str) -> bytes | None:
        """Return the last note of the log whose origin has this hash; None if there is none."""
        path = self.folder / f"{digest}.note"
        return path.read_bytes() if path.exists() else None

    def _path(self, origin: str) -> Path:
        return self.folder / f"{sha256(origin.encode()).hexdigest()}.note"
