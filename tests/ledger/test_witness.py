"""Requests to witnesses: one byte form, and a decision with the status that C2SP's tlog-witness has for it."""

import base64
from hashlib import sha256

import pytest

from ledger import note, tree
from ledger.checkpoint import Checkpoint, sign
from ledger.note import Note, NoteKey
from ledger.tree import EMPTY_ROOT, Hash
from ledger.witness import PROOF_MAX_LINES, AddCheckpoint, Objection, judge, parse_size
from protocol.errors import MalformedMessage
from tests.ledger import notes

LEAVES = [tree.leaf_hash(bytes([number])) for number in range(40)]

PUBLISHED = b"""old 20852014
PlRNCrwHpqhGrupue0L7gxbjbMiKA9temvuZZDDpkaw=
jrJZDmY8Y7SyJE0MWLpLozkIVMSMZcD5kvuKxPC3swk=
5+pKlUdi2LeF/BcMHBn+Ku6yhPGNCswZZD1X/6QgPd8=
/6WVhPs2CwSsb5rYBH5cjHV/wSmA79abXAwhXw3Kj/0=

example.com/behind-the-sofa
20852163
CsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=

\xe2\x80\x94 example.com/behind-the-sofa Az3grlgtzPICa5OS8npVmf1Myq/5IZniMp+ZJurmRDeOoRDe4URYN7u5/Zhcyv2q1gGzGku9nTo+zyWE+xeMcTOAYQ8=
"""  # noqa: E501  # a line as it was signed
"""The example of C2SP's tlog-witness, with the first of its signatures."""


def root(size: int) -> Hash:
    return tree.root_of(LEAVES[:size])


def state(size: int) -> Checkpoint:
    return Checkpoint(notes.KEY.name, size, root(size))


def signed(checkpoint: Checkpoint) -> bytes:
    return sign(checkpoint, notes.KEY, notes.PRIVATE.sign)


def proof(old: int, new: int) -> tuple[bytes, ...]:
    """The proof, from leaves in memory."""
    if old in (0, new):
        return ()
    hashes = [tree.root_of(LEAVES[start:end]) for start, end in tree.consistency_ranges(old, new)]
    return tuple(tree.without_seed(old, new, hashes))


def asked(old: int, new: int) -> AddCheckpoint:
    return AddCheckpoint(old, proof(old, new), signed(state(new)))


def status(request: AddCheckpoint, last: Checkpoint | None, keys: tuple[NoteKey, ...] = (notes.KEY,)) -> int:
    decision = judge(request, keys, last)
    return decision.status if isinstance(decision, Objection) else 200


def test_the_published_example_reads_and_writes_back() -> None:
    request = AddCheckpoint.parse(PUBLISHED)
    assert (request.old, len(request.proof), request.origin) == (20852014, 4, "example.com/behind-the-sofa")
    assert request.to_bytes() == PUBLISHED


@pytest.mark.parametrize(
    "body",
    [
        b"", b"old 1\n", b"old 01\n\n", b"old -1\n\n", b"Old 1\n\n", b"old 1 \n\n", b"old 1\nAAAA\n\n",
        b"old 1\r\n\n", "old ١\n\n".encode(), b"\n\nold 1\n\n", b"old " + b"9" * 20 + b"\n\n",
        b"old 1\n" + (base64.b64encode(bytes(32)) + b"\n") * (PROOF_MAX_LINES + 1) + b"\n",
    ],
)  # fmt: skip
def test_what_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(MalformedMessage):
        AddCheckpoint.parse(body)


@pytest.mark.parametrize("old", [0, 1, 2, 7, 8, 9, 39, 40])
def test_a_log_that_continues_what_was_signed_is_signed(old: int) -> None:
    """Sizes at the edges of perfect trees; the proof travels through the written form."""
    request = AddCheckpoint.parse(asked(old, 40).to_bytes())
    assert judge(request, [notes.KEY], state(old) if old else None) == state(40)


def test_an_unknown_log_and_an_unknown_key_are_told_apart() -> None:
    assert status(asked(0, 3), None, ()) == 404
    thief = NoteKey(notes.KEY.name, notes.THIEF.public_key().public_bytes_raw())
    assert status(asked(0, 3), None, (thief,)) == 403
    forged = note.parse(signed(state(3)))
    line = forged.signatures[0]
    broken = Note(forged.text, (note.Signature(line.name, line.key_id, bytes(64)),)).to_bytes()
    assert status(AddCheckpoint(0, (), broken), None) == 403
    renamed = sign(Checkpoint("elsewhere", 3, root(3)), notes.KEY, notes.PRIVATE.sign)
    assert status(AddCheckpoint(0, (), renamed), None) == 403, "the origin is not the key's name"
    assert status(AddCheckpoint(0, (), b"no note"), None) == 400


def test_a_note_with_a_wrong_signature_of_any_trusted_key_is_not_signed() -> None:
    """A log that replaced its key: tlog-witness wants 403 even if another line is right."""
    newer = NoteKey(notes.KEY.name, notes.THIEF.public_key().public_bytes_raw())
    both = note.parse(signed(state(3))).signed_by(newer, bytes(64)).to_bytes()
    assert status(AddCheckpoint(0, (), both), None) == 200
    assert status(AddCheckpoint(0, (), both), None, (notes.KEY, newer)) == 403
    assert status(AddCheckpoint(0, (), both), None, (newer, notes.KEY)) == 403


def test_a_log_that_does_not_know_what_was_signed_last_is_told() -> None:
    decision = judge(asked(5, 9), [notes.KEY], state(7))
    assert isinstance(decision, Objection)
    assert (decision.status, decision.size) == (409, 7)
    assert status(asked(5, 9), None) == 409
    assert judge(asked(0, 9), [notes.KEY], state(7)) == Objection(409, decision.text, 7)


def test_a_shorter_log_is_not_signed_again() -> None:
    """The replay of an old checkpoint: with its own old size, and with the one that was signed last."""
    assert status(asked(3, 5), state(7)) == 409
    assert status(AddCheckpoint(7, (), signed(state(5))), state(7)) == 400


def test_a_log_with_another_history_is_not_signed() -> None:
    other = Checkpoint(notes.KEY.name, 7, Hash(bytes(32)))
    assert status(asked(7, 9), other) == 422
    assert status(asked(7, 7), other) == 422, "one size, two roots"
    assert status(AddCheckpoint(7, proof(7, 9)[1:], signed(state(9))), state(7)) == 422
    assert status(AddCheckpoint(7, (), signed(state(9))), state(7)) == 422
    assert status(AddCheckpoint(0, (bytes(32),), signed(state(9))), None) == 422, "nothing is to be proved"


def test_an_empty_log_has_the_empty_root() -> None:
    empty = Checkpoint(notes.KEY.name, 0, EMPTY_ROOT)
    assert judge(AddCheckpoint(0, (), signed(empty)), [notes.KEY], None) == empty
    wrong = signed(Checkpoint(notes.KEY.name, 0, Hash(sha256(b"x").digest())))
    assert status(AddCheckpoint(0, (), wrong), None) == 422
    assert judge(asked(0, 4), [notes.KEY], empty) == state(4)


def test_a_checkpoint_of_another_log_may_have_more_lines() -> None:
    text = f"{notes.KEY.name}\n3\n{base64.b64encode(root(3)).decode()}\nan extension\nanother one\n"
    extended = Note(text, ()).signed_by(notes.KEY, notes.PRIVATE.sign(text.encode())).to_bytes()
    assert judge(AddCheckpoint(0, (), extended), [notes.KEY], None) == state(3)


@pytest.mark.parametrize(("data", "size"), [(b"0\n", 0), (b"7", 7), (b"20852014\n", 20852014)])
def test_a_size_is_read(data: bytes, size: int) -> None:
    assert parse_size(data) == size


@pytest.mark.parametrize("data", [b"", b"01\n", b"-1\n", b"7\n\n", b"7 ", b"x", b"9" * 19, b"\xff"])
def test_what_is_no_size_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        parse_size(data)
