"""Contents of a root document that is trusted already: fingerprint, ledger key and unit.

- Nothing here checks a signature: `pin` compares a first root with the join string, and `protocol.policy.trust` follows
  the rotations from it.
- TUF's library is not needed: a command that only reads what this machine trusts starts without it.
"""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from protocol.errors import UntrustedMetadata, UntrustedRoot
from protocol.text.money import Unit, parse_unit


@dataclass(frozen=True)
class Documents:
    """The trust state of a node: signed documents exactly as they were served."""

    round_id: str
    root: bytes
    timestamp: bytes | None = None
    snapshot: bytes | None = None
    targets: bytes | None = None
    manifest: bytes | None = None
    policy_version: int = 0


def fingerprint(root: bytes) -> str:
    """Return the SHA-256 of a round's first root document; it is the round id and part of the join string."""
    return hashlib.sha256(root).hexdigest()


def pin(root: bytes, expected: str) -> Documents:
    """Step 1 for a node that joins: accept the first root because the join string names it."""
    if (found := fingerprint(root)) != expected:
        raise UntrustedRoot(
            f"The fingerprint of the coordinator's root is {found}, and the join string has {expected}.",
            hint="Copy the whole join string again. If it is correct, another server answers as the coordinator.",
        )
    return Documents(round_id=expected, root=root)


LEDGER_FIELD = "x-echo-swarm-ledger"
"""The field of a root document with the ledger's key, in the form of TUF's own keys."""

RESUMED_FIELD = "x-echo-swarm-resumed"
"""The field of a root document that records a gap after which the log was resumed; see `ledger.gaps`."""

UNIT_FIELD = "x-echo-swarm-unit"
"""The field of a root document with the unit of the round's amounts; the first root has it, so the round id pins it."""


def ledger_key(root: bytes) -> bytes:
    """Return the public key that a root names for the ledger; the caller already trusts the root."""
    return ledger_key_of(_signed(root))


def ledger_key_of(fields: Mapping[str, Any]) -> bytes:
    """Return the ledger's key from the fields of a root."""
    field: Any = fields.get(LEDGER_FIELD)
    with suppress(KeyError, TypeError, ValueError):
        public = bytes.fromhex(field["keyval"]["public"])
        if field["keytype"] == "ed25519" and len(public) == 32:
            return public
    raise UntrustedMetadata("The round's root has no key for its ledger.", hint="It is too old: make a new round.")


def unit_of(root: bytes) -> Unit:
    """Return the unit that a root names, `CREDITS` without one; the caller already trusts the root."""
    return parse_unit(_signed(root).get(UNIT_FIELD))


def _signed(root: bytes) -> dict[str, Any]:
    """Return the signed part of a root."""
    with suppress(ValueError, LookupError, TypeError, RecursionError):
        fields = json.loads(root)["signed"]
        if isinstance(fields, dict):
            return fields
    raise UntrustedMetadata("The round's root is not a document of trust metadata.")
