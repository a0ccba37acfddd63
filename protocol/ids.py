"""Typed names for the things the swarm counts, and the derivation of a node's id from its key.

- A node id is the libp2p peer id of its Ed25519 key, so the peer on the wire and the account in the ledger are one.
- The key can be read back from the id, so the id is enough to check its signatures.
"""

from functools import lru_cache
from typing import Annotated, NewType

import base58
from pydantic import StringConstraints

from protocol.errors import MalformedMessage

NodeId = NewType("NodeId", str)
ChunkId = NewType("ChunkId", str)
Digest = NewType("Digest", str)
LeaseId = NewType("LeaseId", str)
ClaimId = NewType("ClaimId", str)

Hex64 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Hex32 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]

_IDENTITY_MULTIHASH_OF_ED25519 = bytes.fromhex("0024" + "08011220")
"""Multihash "identity, 36 bytes", then protobuf "key type Ed25519, 32 bytes": libp2p's prefix of every such peer id."""


def node_id(public_key: bytes) -> NodeId:
    """Return the peer id of a raw 32-byte Ed25519 public key."""
    if len(public_key) != 32:
        raise MalformedMessage(f"An Ed25519 public key has 32 bytes, not {len(public_key)}.")
    return NodeId(base58.b58encode(_IDENTITY_MULTIHASH_OF_ED25519 + public_key).decode())


@lru_cache(maxsize=4096)
def public_key(node: NodeId) -> bytes:
    """Return the raw Ed25519 public key from which a node id was made."""
    try:
        raw = base58.b58decode(node) if len(node) == 52 else b""
    except ValueError:
        raw = b""
    if len(raw) != 38 or not raw.startswith(_IDENTITY_MULTIHASH_OF_ED25519):
        raise MalformedMessage(f"{node[:60]!r} is not the id of an Ed25519 key.")
    return raw[6:]
