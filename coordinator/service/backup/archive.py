"""Backup archives: a folder or one tar file, written and read; and the reader of a standby copy (`following`).

- Files may have any names. In a backup's list, bytes that are not text, and %, are written as %XX; each file has one
  such name, and a name that could leave the folder is rejected.
- Files are hashed while they are added. A file that grows meanwhile is saved up to its length when it was opened.
- A backup is complete or absent: everything is written to `.NAME.partial` beside the target, and this is synced and
  renamed at the end.

`backup.json`, the last file that is written, lists the contents. The round's secrets are sealed under a passphrase
(AES-256-GCM, the key by scrypt):

- An attacker who has a backup must guess the passphrase, at a sixth of a second and 128 MiB a try.
- The seal covers the list of the other files: an attacker who changes a backup without the passphrase makes one that
  does not open.
- A wrong passphrase, a damaged file and a changed backup cause the same error, and no bytes are returned.
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
"""Folder of a standby copy for the files of a round, by their digests."""

PIECE_BYTES = 2**20
CONTENTS_MAX_BYTES = 2**28


class BackupInvalid(SwarmError):
    """A backup that is not whole, cannot be read, or must not be used."""

    code, http_status, fault = "backup_invalid", 422, "operator"


def escaped(path: str) -> str:
    """Return the name of a relative path in a backup."""
    text = os.fsdecode(os.fsencode(path))
    return "".join(f"%{ord(char) & 0xFF:02X}" if char == "%" or "\udc80" <= char <= "\udcff" else char for char in text)


def plain(name: str) -> str:
    """Return the relative path of a name in a backup; raise `BackupInvalid` if it could leave its folder."""
    path = re.sub("%25|%[89A-F][0-9A-F]", lambda match: _unescaped(int(match[0][1:], 16)), name)
    try:
        is_its_name = escaped(path) == name
    except UnicodeEncodeError:  # a lone surrogate
        is_its_name = False
    if not is_its_name or "\0" in path or not {"", ".", ".."}.isdisjoint(path.split("/")):
        raise BackupInvalid(f"{name!r} is not a valid file name in a backup.")
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
    """A target to which files are added."""

    def add(self, name: str, source: IO[bytes], size_bytes: int) -> Entry: ...


class ArchiveReader(Protocol):
    """A source from which files are read."""

    def open(self, name: str) -> IO[bytes]: ...


class _HashedPart(io.RawIOBase):
    """The first `size_bytes` of a file, hashed as they are read."""

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
    """The first `size_bytes` of a file."""

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
            raise BackupInvalid(f"The backup has no file {name}.", hint="Use another backup.")
        return path.open("rb")


class _StandbyReader:
    """A reader of a standby copy: files by their digests, each up to the size in the list."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            listed = json.loads((folder / CONTENTS).read_bytes())["files"]
            self._entries = {entry["name"]: Entry.model_validate(entry) for entry in listed}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BackupInvalid(
                f"{folder} is not a complete standby copy: {error}.", hint="Use another copy."
            ) from None

    def open(self, name: str) -> IO[bytes]:
        if name == CONTENTS:
            return (self._folder / CONTENTS).open("rb")
        entry = self._entries.get(name)
        path = self._folder / standby_path(entry) if entry else None
        if entry is None or path is None or path.is_symlink() or not path.is_file():
            raise BackupInvalid(f"The standby copy has no file {name}.", hint="Use another copy.")
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
            raise BackupInvalid(f"The backup has no file {name}.", hint="Use another backup.")
        return file


@contextmanager
def writing(target: Path) -> Iterator[tuple[Writer, Path]]:
    """Yield a writer and its partial target; remove the target if the body raises. The caller renames it."""
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
def reading(source: Path) -> Iterator[ArchiveReader]:
    """Yield a reader of a backup that `writing` wrote, or of a standby copy."""
    if source.is_dir():
        yield _StandbyReader(source) if is_standby(source) else _FolderReader(source)
        return
    try:
        with tarfile.open(source, "r:") as tar:
            yield _TarReader(tar)
    except FileNotFoundError:
        raise BackupInvalid(
            f"There is no backup at {source}.", hint="Give the path of the backup file or folder."
        ) from None
    except tarfile.TarError as error:
        raise BackupInvalid(f"{source} is not a complete backup: {error}.", hint="Use another backup.") from None


def is_standby(folder: Path) -> bool:
    """Return True for the target of `backup --follow`."""
    return (folder / FILES).is_dir()


def standby_path(entry: Entry) -> str:
    """Return the path of a file in a standby copy."""
    return plain(entry.name) if entry.name.startswith("store/") else f"{FILES}/{entry.digest[:2]}/{entry.digest}"


def described(folder: Path, name: str) -> Entry:
    """Sync a file that other code wrote into a backup's folder, and return its entry."""
    with (folder / plain(name)).open("rb") as file:
        os.fsync(file.fileno())
        hashed = _HashedPart(file, os.fstat(file.fileno()).st_size)
        size_bytes = 0
        while piece := hashed.read(PIECE_BYTES):
            size_bytes += len(piece)
    return Entry(name=name, size_bytes=size_bytes, digest=hashed.hasher.hexdigest())


def require_sound(reader: ArchiveReader, entry: Entry) -> None:
    """Read a file of a backup, and compare its size and digest with its entry."""
    hasher, size = blake3(), 0
    with reader.open(entry.name) as file:
        while piece := file.read(PIECE_BYTES):
            hasher.update(piece)
            size += len(piece)
    if (size, hasher.hexdigest()) != (entry.size_bytes, entry.digest):
        raise BackupInvalid(f"The file {entry.name} of the backup is damaged.", hint="Use another backup.")


def discard(path: Path) -> None:
    """Remove the remains of an earlier attempt."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


SEALED = "keys.sealed"


class Contents(Section):
    """The list of a backup: the state of the round, and every file with its digest."""

    format: Literal[1] = 1
    made_ms: int
    round_id: str = Field(pattern="^[0-9a-f]{64}$")
    database: Literal["sqlite", "postgresql"]
    schema_number: int
    ledger_size: int
    checkpoint: str
    """The last signed checkpoint; empty before the first."""
    version: int
    keys: Literal["sealed", "left out"]
    folder: Literal["saved", "as it is"] = "saved"
    """The rest of the round's folder: saved in the backup, or left in place beside a copy of the store alone."""
    files: tuple[Entry, ...]

    def digest(self) -> bytes:
        """Return the digest of all fields without the entry of the sealed keys, which are sealed with this digest."""
        others = tuple(entry for entry in self.files if entry.name != SEALED)
        young = {"folder"} if self.folder == "saved" else None  # older backups were sealed without this field
        return blake3(self.model_copy(update={"files": others}).model_dump_json(exclude=young).encode()).digest()

    @classmethod
    def read(cls, reader: ArchiveReader) -> "Contents":
        with reader.open(CONTENTS) as file:
            data = file.read(CONTENTS_MAX_BYTES)
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise BackupInvalid(f"{CONTENTS} is not valid: {error.errors()[0]['msg']}.") from None


HEAD = b"echo-swarm sealed keys 1\n"
SALT_BYTES, NONCE_BYTES = 16, 12
COST = 2**17
SECRETS_MAX_BYTES = 2**24


class Sealer:
    """Sealing with one passphrase, many times: the costly key derivation runs once."""

    def __init__(self, passphrase: str) -> None:
        self._salt = os.urandom(SALT_BYTES)
        self._cipher = AESGCM(_key(passphrase, self._salt))

    def seal(self, files: Mapping[str, bytes], beside: bytes) -> bytes:
        """Seal the files; opening them needs the passphrase and the same `beside`."""
        nonce = os.urandom(NONCE_BYTES)
        data = canonical.encode([[name, files[name]] for name in sorted(files)])
        return HEAD + self._salt + nonce + self._cipher.encrypt(nonce, data, HEAD + beside)


def seal(files: Mapping[str, bytes], passphrase: str, beside: bytes) -> bytes:
    """Seal the files with a new `Sealer`."""
    return Sealer(passphrase).seal(files, beside)


def unseal(data: bytes, passphrase: str, beside: bytes) -> dict[str, bytes]:
    """Return the files from `data` that `seal` made."""
    body = data.removeprefix(HEAD)
    salt, nonce, rest = body[:SALT_BYTES], body[SALT_BYTES:][:NONCE_BYTES], body[SALT_BYTES + NONCE_BYTES :]
    try:
        if body is data or len(salt + nonce) < SALT_BYTES + NONCE_BYTES:
            raise InvalidTag
        plain = AESGCM(_key(passphrase, salt)).decrypt(nonce, rest, HEAD + beside)
    except InvalidTag:
        raise BackupInvalid(
            "The passphrase is wrong for the keys of this backup, or the backup was changed.",
            hint="Try again. If the passphrase is right, do not trust this backup: use another one.",
        ) from None
    files = canonical.decode(plain, max_bytes=SECRETS_MAX_BYTES)
    assert isinstance(files, list)
    return {str(name): bytes(content) for name, content in files}


def _key(passphrase: str, salt: bytes) -> bytes:
    return Scrypt(salt=salt, length=32, n=COST, r=8, p=1).derive(passphrase.encode())
