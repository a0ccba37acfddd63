"""What a backup says of itself: `backup.json`, the last file that is written."""

from typing import Literal

from blake3 import blake3
from pydantic import Field, ValidationError

from coordinator.backup.archive import CONTENTS, CONTENTS_MAX_BYTES, BackupInvalid, Entry, Reader
from coordinator.config.section import Section

SEALED = "keys.sealed"


class Contents(Section):
    """Where the round stood, and every file with its digest."""

    format: Literal[1] = 1
    made_ms: int
    round_id: str = Field(pattern="^[0-9a-f]{64}$")
    database: Literal["sqlite", "postgresql"]
    schema_number: int
    ledger_size: int
    checkpoint: str
    """The last one that was signed; empty before the first."""
    version: int
    keys: Literal["sealed", "left out"]
    folder: Literal["saved", "as it is"] = "saved"
    """The rest of the round's folder: saved, too, or as it is in the folder around this copy of the store alone."""
    files: tuple[Entry, ...]

    def digest(self) -> bytes:
        """Of all that it says but of the sealed keys, which are sealed with this."""
        others = tuple(entry for entry in self.files if entry.name != SEALED)
        young = {"folder"} if self.folder == "saved" else None  # older backups were sealed without the word
        return blake3(self.model_copy(update={"files": others}).model_dump_json(exclude=young).encode()).digest()

    @classmethod
    def read(cls, reader: Reader) -> "Contents":
        with reader.open(CONTENTS) as file:
            data = file.read(CONTENTS_MAX_BYTES)
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise BackupInvalid(f"{CONTENTS} says nothing that is understood: {error.errors()[0]['msg']}.") from None
