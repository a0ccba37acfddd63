"""Node ids: one key, one id, and it is the one that libp2p gives the same key."""

import base58
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import ids
from protocol.errors import MalformedMessage
from protocol.ids import NodeId
from protocol.wire.signing import NodeKey

keys = st.binary(min_size=32, max_size=32)

ED25519_PREFIX = bytes.fromhex("002408011220")


def b58(data: bytes) -> NodeId:
    return NodeId(base58.b58encode(data).decode())


@given(keys)
def test_a_key_can_be_read_back_from_its_id(key: bytes) -> None:
    node = ids.node_id(key)
    assert len(node) == 52
    assert ids.public_key(node) == key


@given(st.binary(min_size=32, max_size=32))
def test_the_peer_on_the_wire_is_the_account_in_the_ledger(seed: bytes) -> None:
    from libp2p.crypto.ed25519 import create_new_key_pair
    from libp2p.peer.id import ID

    assert NodeKey(seed).node_id == str(ID.from_pubkey(create_new_key_pair(seed).public_key))


@given(
    st.text(max_size=60)
    | st.text("123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz", min_size=52, max_size=52)
)
def test_no_two_texts_name_the_same_key(text: str) -> None:
    try:
        key = ids.public_key(NodeId(text))
    except MalformedMessage:
        return
    assert ids.node_id(key) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        b58(b""),
        b58(ED25519_PREFIX + bytes(31)),
        b58(ED25519_PREFIX + bytes(33)),
        b58(bytes.fromhex("002408021220") + bytes(32)),  # a secp256k1 key's type
        b58(bytes.fromhex("122008011220") + bytes(32)),  # a hash, not the key itself
        ids.node_id(bytes(32)) + " ",
        " " + ids.node_id(bytes(32)),
        ids.node_id(bytes(32))[:-1] + "\n",
        ids.node_id(bytes(32))[:-1] + "0",  # not in the alphabet
        ids.node_id(bytes(32))[:-1] + "é",
        "1" * 52,
        "z" * 52,
    ],
)
def test_what_is_no_ed25519_id_is_refused(text: str) -> None:
    with pytest.raises(MalformedMessage):
        ids.public_key(NodeId(text))


@pytest.mark.parametrize("length", [0, 31, 33, 64])
def test_a_key_of_another_length_has_no_id(length: int) -> None:
    with pytest.raises(MalformedMessage):
        ids.node_id(bytes(length))
