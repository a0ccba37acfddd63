"""Where a backup is written to and read from: a folder or one tar file; and how a standby copy is read (`following`).

- Files may have any names. Where a backup speaks of them, bytes that are no text, and %, stand as %XX; each file has
  one such name, and a name that could leave the folder is refused, whoever wrote it.
- What is added is hashed on the way. A file that grows meanwhile is taken as long as it was when it was opened.
- Whole or not there: everything goes to `.NAME.partial` beside the target, which is synced and renamed at the end.

`backup.json`, the last file that is written, says what the backup holds. The round's secrets are sealed under a
passphrase (AES-256-GCM, the key by scrypt):

- Whoever finds a backup has to guess the passphrase, at a sixth of a second and 128 MiB a try.
- They are sealed together with what stands beside them: whoever can change a backup, but does not know the passphrase,
  makes one that does not open.
- A wrong passphrase, a damaged file and a changed backup look the same, and none gives a byte.
"""

import io
import json
import os
import re
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Any, Literal, Protocol

from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
from pydantic import AfterValidator, Field, ValidationError

from coordinator.base.files import full_disk_named
from coordinator.config.section import Section
from protocol.errors import SwarmError
from protocol.wire import canonical

TAR = ".tar"
CONTENTS = "backup.json"
FILES = "files"
"""Where a standby copy has the files of a round, by their digests."""

PIECE_BYTES = 2**20
CONTENTS_MAX_BYTES = 2**28


class BackupInvalid(SwarmError):
    """A backup that is not whole, cannot be read, or must not be used."""

    code, http_status, fault = "backup_invalid", 422, "operator"


def escaped(path: str) -> str:
    """The name that a relative path has in a backup."""
    text = os.fsdecode(os.fsencode(path))
    return "".join(f"%{ord(char) & 0xFF:02X}" if char == "%" or "\udc80" <= char <= "\udcff" else char for char in text)


def plain(name: str) -> str:
    """The relative path that a name in a backup stands for; it stays in its folder."""
    path = re.sub("%25|%[89A-F][0-9A-F]", lambda found: _unescaped(int(found[0][1:], 16)), name)
    try:
        is_its_name = escaped(path) == name
    except UnicodeEncodeError:  # half a character
        is_its_name = False
    if not is_its_name or "\0" in path or not {"", ".", ".."}.isdisjoint(path.split("/")):
        raise BackupInvalid(f"{name!r} is no name of a file in a backup.")
    return path


def _unescaped(byte: int) -> str:
    return "%" if byte == ord("%") else chr(0xDC00 + byte)


def _checked(name: str) -> str:
    plain(name)
    return name


class Entry(Section):
    """A file of a backup."""

    name: Annotated[str, AfterValidator(_checked)]
    size_bytes: int = Field(ge=0)
    digest: str = Field(pattern="^[0-9a-f]{64}$")


class Writer(Protocol):
    """Takes files."""

    def add(self, name: str, source: IO[bytes], size_bytes: int) -> Entry: ...


class Reader(Protocol):
    """Gives them back."""

    def open(self, name: str) -> IO[bytes]: ...


class _HashedPart(io.RawIOBase):
    """So many bytes of a file, hashed as they are read."""

    def __init__(self, source: IO[bytes], size_bytes: int) -> None:
        self._source = source
        self._left = size_bytes
        self.hasher = blake3()

    def read(self, size: int = -1) -> bytes:
        wanted = self._left if size < 0 else min(size, self._left)
        data = self._source.read(wanted)
        self._left -= len(data)
        self.hasher.update(data)
        return data


class _Part(io.RawIOBase):
    """The first bytes of a file."""

    def __init__(self, file: IO[bytes], size_bytes: int) -> None:
        self._file = file
        self._left = size_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(min(self._left, len(buffer)))
        buffer[: len(data)] = data
        self._left -= len(data)
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


class _FolderWriter:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700)

    def add(self, name: str, source: IO[bytes], size_bytes: int) -> Entry:
        path = self._folder / plain(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        hashed = _HashedPart(source, size_bytes)
        with path.open("xb") as file:
            while piece := hashed.read(PIECE_BYTES):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            written = file.tell()
        return Entry(name=name, size_bytes=written, digest=hashed.hasher.hexdigest())


class _TarWriter:
    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar

    def add(self, name: str, source: IO[bytes], size_bytes: int) -> Entry:
        info = tarfile.TarInfo(plain(name))
        info.size, info.mode = size_bytes, 0o600
        hashed = _HashedPart(source, size_bytes)
        self._tar.addfile(info, hashed)
        return Entry(name=name, size_bytes=size_bytes, digest=hashed.hasher.hexdigest())


class _FolderReader:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open(self, name: str) -> IO[bytes]:
        path = self._folder / plain(name)
        if path.is_symlink() or not path.is_file():
            raise BackupInvalid(f"The backup has no file {name}.", hint="Take another one.")
        return path.open("rb")


class _StandbyReader:
    """A standby copy: files by their digests, and of the store's logs as much as the list says."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            listed = json.loads((folder / CONTENTS).read_bytes())["files"]
            self._entries = {entry["name"]: Entry.model_validate(entry) for entry in listed}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BackupInvalid(f"{folder} is no whole standby copy: {error}.", hint="Use another one.") from None

    def open(self, name: str) -> IO[bytes]:
        if name == CONTENTS:
            return (self._folder / CONTENTS).open("rb")
        entry = self._entries.get(name)
        path = self._folder / standby_path(entry) if entry else None
        if entry is None or path is None or path.is_symlink() or not path.is_file():
            raise BackupInvalid(f"The standby copy has no file {name}.", hint="Use another one.")
        return io.BufferedReader(_Part(path.open("rb"), entry.size_bytes))


class _TarReader:
    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar

    def open(self, name: str) -> IO[bytes]:
        try:
            file = self._tar.extractfile(plain(name))
        except KeyError:
            file = None
        if file is None:
            raise BackupInvalid(f"The backup has no file {name}.", hint="Take another one.")
        return file


@contextmanager
def writing(target: Path) -> Iterator[tuple[Writer, Path]]:
    """A writer, and what it writes to until the body has ended well; then that gets its name."""
    partial = target.with_name(f".{target.name}.partial")
    discard(partial)
    with full_disk_named(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            if target.suffix == TAR:
                with partial.open("xb") as file:
                    os.fchmod(file.fileno(), 0o600)
                    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
                        yield _TarWriter(tar), partial
                    file.flush()
                    os.fsync(file.fileno())
            else:
                yield _FolderWriter(partial), partial
        except BaseException:
            discard(partial)
            raise


@contextmanager
def reading(source: Path) -> Iterator[Reader]:
    """What `writing` wrote."""
    if source.is_dir():
        yield _StandbyReader(source) if is_standby(source) else _FolderReader(source)
        return
    try:
        with tarfile.open(source, "r:") as tar:
            yield _TarReader(tar)
    except FileNotFoundError:
        raise BackupInvalid(f"There is no backup at {source}.", hint="Name the file or folder.") from None
    except tarfile.TarError as error:
        raise BackupInvalid(f"{source} is no whole backup: {error}.", hint="Take another one.") from None


def is_standby(folder: Path) -> bool:
    """Return True for the target of `backup --follow`."""
    return (folder / FILES).is_dir()


def standby_path(entry: Entry) -> str:
    """Where a standby copy has a file."""
    return plain(entry.name) if entry.name.startswith("store/") else f"{FILES}/{entry.digest[:2]}/{entry.digest}"


def described(folder: Path, name: str) -> Entry:
    """A file that was written into a backup's folder by somebody else; it is synced."""
    with (folder / plain(name)).open("rb") as file:
        os.fsync(file.fileno())
        hashed = _HashedPart(file, os.fstat(file.fileno()).st_size)
        size_bytes = 0
        while piece := hashed.read(PIECE_BYTES):
            size_bytes += len(piece)
    return Entry(name=name, size_bytes=size_bytes, digest=hashed.hasher.hexdigest())


def require_sound(reader: Reader, entry: Entry) -> None:
    """Read a file of a backup, and compare."""
    hasher, size = blake3(), 0
    with reader.open(entry.name) as file:
        while piece := file.read(PIECE_BYTES):
            hasher.update(piece)
            size += len(piece)
    if (size, hasher.hexdigest()) != (entry.size_bytes, entry.digest):
        raise BackupInvalid(f"{entry.name} of the backup is damaged.", hint="Take another one.")


def discard(path: Path) -> None:
    """Remove what an earlier attempt left."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


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


HEAD = b"echo-swarm sealed keys 1\n"
SALT_BYTES, NONCE_BYTES = 16, 12
COST = 2**17
SECRETS_MAX_BYTES = 2**24


class Sealer:
    """Seals again and again with one passphrase: the costly part is done once."""

    def __init__(self, passphrase: str) -> None:
        self._salt = os.urandom(SALT_BYTES)
        self._cipher = AESGCM(_key(passphrase, self._salt))

    def seal(self, files: Mapping[str, bytes], beside: bytes) -> bytes:
        """The files, for those who know the passphrase and have the same beside them."""
        nonce = os.urandom(NONCE_BYTES)
        data = canonical.encode([[name, files[name]] for name in sorted(files)])
        return HEAD + self._salt + nonce + self._cipher.encrypt(nonce, data, HEAD + beside)


def seal(files: Mapping[str, bytes], passphrase: str, beside: bytes) -> bytes:
    """The same, once."""
    return Sealer(passphrase).seal(files, beside)


def unseal(data: bytes, passphrase: str, beside: bytes) -> dict[str, bytes]:
    """The files again."""
    body = data.removeprefix(HEAD)
    salt, nonce, rest = body[:SALT_BYTES], body[SALT_BYTES:][:NONCE_BYTES], body[SALT_BYTES + NONCE_BYTES :]
    try:
        if body is data or len(salt + nonce) < SALT_BYTES + NONCE_BYTES:
            raise InvalidTag
        plain = AESGCM(_key(passphrase, salt)).decrypt(nonce, rest, HEAD + beside)
    except InvalidTag:
        raise BackupInvalid(
            "The passphrase does not open the keys of this backup, or somebody has changed it since.",
            hint="Try again; if you are sure of the passphrase, trust nothing in this backup and take another one.",
        ) from None
    found = canonical.decode(plain, max_bytes=SECRETS_MAX_BYTES)
    assert isinstance(found, list)
    return {str(name): bytes(content) for name, content in found}


def _key(passphrase: str, salt: bytes) -> bytes:
    return Scrypt(salt=salt, length=32, n=COST, r=8, p=1).derive(passphrase.encode())
