"""Checkpoints, notes and cosignatures: frozen texts, the standards' own examples, and everything that is not one."""

import base64

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from ledger import note, witness
from ledger.checkpoint import Checkpoint, ledger_key, open_checkpoint, sign
from ledger.note import KeyKind, NoteKey
from protocol.errors import CheckpointInvalid, NotWitnessed, SwarmError
from tests.ledger import notes
from tests.ledger.notes import KEY, PRIVATE, ROUND_ID, THIEF

NOTE = notes.checkpoint(20_852_163)
FROZEN = (
    f"echo-swarm/{ROUND_ID}\n20852163\ncnJycnJycnJycnJycnJycnJycnJycnJycnJycnJycnI=\n\n— echo-swarm/{ROUND_ID} "
    "SIGNATURE\n"
).encode()

GO_KEY = "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"
GO_NOTE = (
    "If you think cryptography is the answer to your problem,\nthen you don't know what your problem is.\n\n"
    "— PeterNeumann x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngotpRZb6KE6RyyBwJnAM=\n"
)
"""The example of golang.org/x/mod/sumdb/note, where this format comes from."""


def changed(text: bytes, *replaced: tuple[bytes, bytes]) -> bytes:
    for old, new in replaced:
        assert old in text
        text = text.replace(old, new)
    return text


def test_checkpoint_text_is_frozen_and_reads_back() -> None:
    assert open_checkpoint(NOTE, [KEY]) == Checkpoint(KEY.name, 20_852_163, b"r" * 32)
    assert NOTE.rpartition(b" ")[0] == FROZEN.rpartition(b" ")[0]


def test_the_key_reads_and_verifies_what_go_has_signed() -> None:
    key, found = NoteKey.parse(GO_KEY), note.parse(GO_NOTE.encode())
    line = found.signature_by(key)
    assert line
    key.verify(line.value, found.text.encode())
    assert str(key) == GO_KEY
    assert found.to_bytes() == GO_NOTE.encode()


def test_checkpoint_signed_by_somebody_else_is_refused() -> None:
    mine = NoteKey(KEY.name, THIEF.public_key().public_bytes_raw())
    forged = [
        sign(Checkpoint(KEY.name, 5, b"r" * 32), mine, THIEF.sign),  # the right name, another key
        sign(Checkpoint(KEY.name, 5, b"r" * 32), KEY, THIEF.sign),  # the right id, too
        notes.checkpoint(5).replace(b"\n5\n", b"\n6\n"),
    ]
    for data in forged:
        with pytest.raises(CheckpointInvalid):
            open_checkpoint(data, [KEY])


def test_checkpoint_of_another_round_is_refused() -> None:
    other = ledger_key("cd" * 32, KEY.public)
    with pytest.raises(CheckpointInvalid):
        open_checkpoint(sign(Checkpoint(other.name, 5, b"r" * 32), other, PRIVATE.sign), [KEY])
    with pytest.raises(CheckpointInvalid, match="not of"):  # its text under this round's name
        open_checkpoint(sign(Checkpoint(other.name, 5, b"r" * 32), KEY, PRIVATE.sign), [KEY])


@pytest.mark.parametrize(
    "text",
    [
        f"{KEY.name}\n05\n{'A' * 43}=\n",  # another form of the same number
        f"{KEY.name}\n-5\n{'A' * 43}=\n",
        f"{KEY.name}\n٥\n{'A' * 43}=\n",
        f"{KEY.name}\n{2**63}\n{'A' * 43}=\n",
        f"{KEY.name}\n5\n{'A' * 42}B=\n",  # bits that base64 does not use
        f"{KEY.name}\n5\n{'A' * 44}\n",  # 33 bytes
        f"{KEY.name}\n0\n{'A' * 43}=\n",  # an empty log has its own root
        f"{KEY.name}\n5\n{'A' * 43}=\nextension\n",
        f"{KEY.name}\n5\n",
        "\n",
    ],
)
def test_signed_text_that_is_no_checkpoint_is_refused(text: str) -> None:
    signed = note.Note(text, ()).signed_by(KEY, PRIVATE.sign(text.encode())).to_bytes()
    with pytest.raises(CheckpointInvalid):
        open_checkpoint(signed, [KEY])


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\n\n", NOTE[:-1], NOTE + b"\n", b"\n" + NOTE[:-1], NOTE.replace(b"\n", b"\r\n"), NOTE + b"\xff",
        NOTE + NOTE.rpartition(b"\n\n")[2], NOTE.replace("—".encode(), b"-"), NOTE[: NOTE.index(b"\n\n") + 2],
        NOTE + b"x" * 20_000, NOTE + "— somebody AA==\n".encode(), NOTE + "— a b AAAAAAAA\n".encode(), b"\0" + NOTE,
        NOTE + 100 * "— somebody AAAAAAAA\n".encode(),
    ],
    ids=range(15),
)  # fmt: skip
def test_bytes_that_are_no_note_are_refused(data: bytes) -> None:
    with pytest.raises(CheckpointInvalid):
        open_checkpoint(data, [KEY])


@given(st.data())
def test_no_changed_byte_of_a_checkpoint_goes_unnoticed(data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(NOTE) - 1))
    other = data.draw(st.integers(1, 255))
    tampered = NOTE[:place] + bytes([NOTE[place] ^ other]) + NOTE[place + 1 :]
    with pytest.raises(SwarmError):
        open_checkpoint(tampered, [KEY])


def test_signatures_of_strangers_are_passed_over() -> None:
    stranger = NoteKey("somebody", THIEF.public_key().public_bytes_raw())
    assert open_checkpoint(note.parse(NOTE).signed_by(stranger, b"rubbish").to_bytes(), [KEY]).size == 20_852_163


@pytest.mark.parametrize("text", ["", "name", "name+00000000+AAAA", GO_KEY + "=", GO_KEY.replace("c74f", "c74e")])
def test_other_texts_are_no_keys(text: str) -> None:
    with pytest.raises(CheckpointInvalid, match="is not the public key of a witness or a log"):
        NoteKey.parse(text)


class TestWitnesses:
    """k of n."""

    def test_cosignature_is_what_the_standard_says(self) -> None:
        key, private = notes.witness(1)
        data = witness.cosign(NOTE, key, private.sign, 1_679_315_147)
        value = base64.b64decode(data.decode().splitlines()[-1].split(" ")[2])
        assert (value[:4], value[4:12]) == (key.id, (1_679_315_147).to_bytes(8))
        body = NOTE.partition(b"\n\n")[0] + b"\n"
        signed = b"cosignature/v1\ntime 1679315147\n" + body
        Ed25519PublicKey.from_public_bytes(key.public).verify(value[12:], signed)
        assert witness.cosigned(data, [key]) == {key: 1_679_315_147}
        assert open_checkpoint(data, [KEY]).size == 20_852_163

    def test_enough_witnesses_are_enough_and_one_less_is_not(self) -> None:
        pairs = [notes.witness(number) for number in (1, 2, 3)]
        keys = [key for key, _ in pairs]
        data = NOTE
        for key, private in pairs[:2]:
            data = witness.cosign(data, key, private.sign, 5)
        witness.require(witness.cosigned(data, keys), keys, 2)
        with pytest.raises(NotWitnessed, match="2 of the 3"):
            witness.require(witness.cosigned(data, keys), keys, 3)

    def test_one_key_under_two_names_counts_once(self) -> None:
        key, private = notes.witness(1)
        alias = NoteKey("alias", key.public, KeyKind.WITNESS)
        data = witness.cosign(witness.cosign(NOTE, key, private.sign, 5), alias, private.sign, 5)
        with pytest.raises(NotWitnessed):
            witness.require(witness.cosigned(data, [key, alias]), [key, alias], 2)

    def test_cosignature_moved_to_another_checkpoint_or_time_is_refused(self) -> None:
        key, private = notes.witness(1)
        line = note.parse(witness.cosign(NOTE, key, private.sign, 5)).signatures[-1]
        later = (6).to_bytes(8) + line.value[8:]
        for data in (
            note.parse(notes.checkpoint(7)).signed_by(key, line.value).to_bytes(),
            note.parse(NOTE).signed_by(key, later).to_bytes(),
            note.parse(NOTE).signed_by(key, b"").to_bytes(),
        ):
            with pytest.raises(CheckpointInvalid):
                witness.require(witness.cosigned(data, [key]), [key], 1)

    def test_witness_that_signs_again_is_counted_by_its_last_word(self) -> None:
        key, private = notes.witness(1)
        data = witness.cosign(witness.cosign(NOTE, key, private.sign, 5), key, private.sign, 9)
        assert witness.cosigned(data, [key]) == {key: 9}

    def test_log_key_is_no_witness(self) -> None:
        with pytest.raises(CheckpointInvalid):
            witness.cosigned(NOTE, [KEY])
