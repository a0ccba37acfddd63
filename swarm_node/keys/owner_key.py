"""The owner's key: created independently of nodes, and stored only in encrypted form.

- A node's key is backed up in the same form, under another kind: neither is taken for the other.
- The file is JSON: the owner's id in the clear, and the seed under a key that scrypt makes of the passphrase
  (ChaCha20-Poly1305, the id as associated data: a file with another id does not open).
- The cost of scrypt is in the file and is bounded when read: a forged file cannot exhaust the memory.
- The passphrase comes from a prompt, a file, or a file descriptor: never from arguments or the environment.
"""

import getpass
import os
import secrets
import sys
from pathlib import Path
from typing import Annotated, Literal

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protocol.errors import ConfigInvalid
from protocol.wire.signing import NodeKey
from swarm_node.base.disk import write_durably

SCRYPT_COST = 2**16
"""64 MiB and a fifth of a second for each guess."""

PASSPHRASE_MIN_CHARS = 10
FILE_MAX_BYTES = 4096

_Hex = Annotated[str, Field(pattern=r"^([0-9a-f]{2})+$", max_length=256)]


Kind = Literal["echo-swarm/owner-key", "echo-swarm/node-key"]

OWNER: Kind = "echo-swarm/owner-key"
NODE: Kind = "echo-swarm/node-key"

_CALLED = {OWNER: "an owner's key", NODE: "the backup of a node's key"}


class KeyFile(BaseModel):
    """Contents of a key file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Kind = OWNER
    owner: str
    """Id of the key: the owner's, or the node's."""
    scrypt_cost: int = Field(ge=2**14, le=2**20)
    salt: _Hex
    nonce: _Hex
    seed: _Hex


def create(path: Path, passphrase: str) -> NodeKey:
    """Create an owner's key in a new file."""
    seed = secrets.token_bytes(32)
    write(path, seed, passphrase)
    return NodeKey(seed)


def write(path: Path, seed: bytes, passphrase: str, kind: Kind = OWNER) -> None:
    """Encrypt a key into a new file."""
    require_new(path)
    if len(passphrase) < PASSPHRASE_MIN_CHARS:
        raise ConfigInvalid(
            f"The passphrase needs at least {PASSPHRASE_MIN_CHARS} characters.", hint="Use a few words."
        )
    owner, salt, nonce = NodeKey(seed).node_id, secrets.token_bytes(16), secrets.token_bytes(12)
    sealed = _cipher(passphrase, salt, SCRYPT_COST).encrypt(nonce, seed, owner.encode())
    hexes = {"salt": salt.hex(), "nonce": nonce.hex(), "seed": sealed.hex()}
    file = KeyFile(kind=kind, owner=owner, scrypt_cost=SCRYPT_COST, **hexes)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, file.model_dump_json(indent=1).encode(), temp_folder=path.parent)


def require_new(path: Path) -> None:
    """Refuse to overwrite a file: it may be the only copy of a key."""
    if path.exists():
        raise ConfigInvalid(f"{path} exists already.", hint="Choose another file: existing keys are never overwritten.")


def read(path: Path, kind: Kind = OWNER) -> KeyFile:
    """Read a key file without decrypting it."""
    hint = "Make one with `swarm-node keys owner new`, or restore it." if kind == OWNER else "Choose another file."
    try:
        with path.open("rb") as file:
            key_file = KeyFile.model_validate_json(file.read(FILE_MAX_BYTES))
    except OSError as error:
        raise ConfigInvalid(f"Cannot read {_CALLED[kind]} in {path}: {error.strerror}.", hint=hint) from None
    except ValidationError:
        key_file = None
    if key_file is None or key_file.kind != kind:
        raise ConfigInvalid(f"{path} does not hold {_CALLED[kind]}.", hint=hint)
    return key_file


def unlock(path: Path, passphrase: str, kind: Kind = OWNER) -> bytes:
    """Decrypt the seed in a file."""
    file = read(path, kind)
    cipher = _cipher(passphrase, bytes.fromhex(file.salt), file.scrypt_cost)
    try:
        return cipher.decrypt(bytes.fromhex(file.nonce), bytes.fromhex(file.seed), file.owner.encode())
    except (InvalidTag, ValueError):
        raise ConfigInvalid(
            f"The passphrase does not open {path}.",
            hint="Check Caps Lock. If the passphrase is right, the file is damaged.",
        ) from None


def passphrase(file: Path | None, descriptor: int | None, *, twice: bool = False) -> str:
    """Return the first line of a file or a descriptor, or else prompt for the passphrase without echo."""
    if file is not None and descriptor is not None:
        raise ConfigInvalid(
            "Give either --passphrase-file or --passphrase-fd, not both.", hint="Remove one of the two options."
        )
    try:
        if file is not None:
            return _first_line(file.read_bytes())
        if descriptor is not None:
            with os.fdopen(descriptor, "rb", closefd=False) as stream:
                return _first_line(stream.read(FILE_MAX_BYTES))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigInvalid(f"Cannot read the passphrase: {error}.") from None
    if not sys.stdin.isatty():
        raise ConfigInvalid(
            "A passphrase is required, but there is no terminal to type it.",
            hint="Give --passphrase-file or --passphrase-fd.",
        )
    typed = getpass.getpass("Passphrase: ")
    if twice and getpass.getpass("Repeat the passphrase: ") != typed:
        raise ConfigInvalid("The two passphrases differ.", hint="Try again.")
    return typed


def _first_line(data: bytes) -> str:
    return data.decode().partition("\n")[0].removesuffix("\r")


def _cipher(words: str, salt: bytes, cost: int) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(Scrypt(salt=salt, length=32, n=cost, r=8, p=1).derive(words.encode()))
