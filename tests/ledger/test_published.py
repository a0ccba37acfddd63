"""Logs that others made and published are read, verified and named here as with them."""

import pytest

from ledger import note, tree, witness
from ledger.checkpoint import open_checkpoint
from ledger.note import KeyKind, NoteKey
from ledger.tiles import TILE_HASHES, tile_of
from protocol.errors import CheckpointInvalid, ProofInvalid
from tests.ledger import published


@pytest.mark.parametrize(("text", "kind"), published.KEYS.items())
def test_ids_of_keys_are_what_their_owners_say(text: str, kind: KeyKind) -> None:
    key = NoteKey.parse(text)
    assert (key.kind, str(key), key.id.hex()) == (kind, text, text.split("+")[1])


def test_the_standards_signed_note_verifies() -> None:
    key, found = NoteKey.parse(published.SIGNED_NOTE_KEY), note.parse(published.SIGNED_NOTE.encode())
    line = found.signature_by(key)
    assert line
    assert found.to_bytes() == published.SIGNED_NOTE.encode()
    key.verify(line.value, found.text.encode())


def test_a_running_logs_checkpoint_is_signed_by_it_and_cosigned_by_two_known_witnesses() -> None:
    log, *witnesses = map(NoteKey.parse, published.COSIGNED_KEYS)
    assert open_checkpoint(published.COSIGNED, [log]).size == 1_432_088_532
    assert witness.cosigned(published.COSIGNED, witnesses) == dict.fromkeys(witnesses, published.COSIGNED_AT_S)


def test_a_cosignature_covers_text_and_time() -> None:
    log, *witnesses = map(NoteKey.parse, published.COSIGNED_KEYS)
    larger = published.COSIGNED.replace(b"\n1432088532\n", b"\n1432088533\n")
    later = published.COSIGNED.replace(b" 2net5wAAAABqEiEg", b" 2net5wAAAABqEiEh")
    assert published.COSIGNED not in (larger, later)
    for data in (larger, later):
        with pytest.raises(CheckpointInvalid):
            witness.cosigned(data, witnesses)
    with pytest.raises(CheckpointInvalid):
        open_checkpoint(larger, [log])


def test_a_log_has_grown_by_the_proof_that_its_witness_takes() -> None:
    (old, old_root), (new, new_root), hashes = published.GROWTH
    roots, proof = [bytes.fromhex(old_root), bytes.fromhex(new_root)], [bytes.fromhex(item) for item in hashes]
    tree.check_consistency(old, roots[0], new, roots[1], proof)
    for wrong in (proof[::-1], proof[1:], [*proof, proof[0]]):
        with pytest.raises(ProofInvalid):
            tree.check_consistency(old, roots[0], new, roots[1], wrong)


@pytest.mark.parametrize(
    ("size", "level", "full", "partial"),
    [(70_000, 0, 273, 112), (70_000, 1, 1, 17), (70_000, 2, 0, 1), (256, 0, 1, 0), (256, 1, 0, 1)],
)
def test_a_tree_has_the_tiles_that_the_standard_counts(size: int, level: int, full: int, partial: int) -> None:
    """The examples of C2SP tlog-tiles.md, section Partial Tiles."""
    assert [tile_of(level, number, size).width for number in range(full)] == [TILE_HASHES] * full
    assert tile_of(level, full, size).width == partial
    if partial:
        assert tile_of(level, full, size).name == f"{level}/{full:03}.p/{partial}"
