"""A log that is resumed after a gap: only root keys can say so, once, and what contradicts it stays a fork."""

from pathlib import Path

import pytest
from tuf.api.metadata import Metadata, Root

from coordinator.publishing import rotation
from coordinator.publishing.signed_metadata import RoleKeys, SignedMetadata, name_ledger_key, utc_now
from coordinator.transactions import witnesses
from ledger import proof, witness
from ledger.checkpoint import Checkpoint, ledger_key, sign
from ledger.gaps import Keys
from protocol.errors import ProofInvalid, UntrustedMetadata
from protocol.policy import root_document
from tests.coordinator.world import World
from tests.ledger import naive_tree
from tests.ledger.notes import witness as named_witness
from tests.ledger.values import deposit, version

KEPT = [deposit(10**9).body, version(1).body, version(2).body]
LOST = [*KEPT, version(3).body, version(4).body]
RESUMED = [*KEPT, version(5).body, version(6).body, version(7).body]


class Roots:
    """A round's root documents, and checkpoints of any bodies by its present ledger key."""

    def __init__(self, folder: Path) -> None:
        self.keys = RoleKeys(folder / "keys")
        self.metadata = SignedMetadata.create(folder / "keys", folder / "metadata", 600.0, utc_now())
        self.round_id = self.metadata.round_id

    def checkpoint(self, bodies: list[bytes]) -> bytes:
        key = ledger_key(self.round_id, self.metadata.ledger_public())
        return sign(Checkpoint(key.name, len(bodies), naive_tree.mth(bodies)), key, self.metadata.sign_for_ledger)

    def gap(self, bodies: list[bytes], lost_size: int) -> dict[str, int | str]:
        return {"size": len(bodies), "root": naive_tree.mth(bodies).hex(), "lost_size": lost_size}

    def resume(self, bodies: list[bytes], lost_size: int) -> None:
        data = rotation.prepare_resumption(self.metadata, self.keys, self.gap(bodies, lost_size), utc_now())
        rotation.install(self.metadata, self.keys, data, utc_now())

    def read(self) -> Keys:
        return Keys(self.metadata.roots(), self.round_id)


@pytest.fixture
def roots(tmp_path: Path) -> Roots:
    return Roots(tmp_path)


def test_what_was_seen_of_lost_entries_counts_up_to_the_gap_and_all_else_as_it_is(roots: Roots) -> None:
    short, long = roots.checkpoint(KEPT[:2]), roots.checkpoint(LOST)
    assert roots.read().open(long)[1] is None
    roots.resume(KEPT, len(LOST))
    keys, later = roots.read(), roots.checkpoint(RESUMED)
    assert keys.counts_as(short).size == 2
    assert keys.counts_as(long) == Checkpoint(f"echo-swarm/{roots.round_id}", 3, naive_tree.mth(KEPT))
    assert keys.counts_as(later).size == len(RESUMED)
    assert str(keys.gaps[0]) == "root 2 resumes the log after its first 3 entries; lost: entries 3 to 4"


def fork(roots: Roots, earlier: bytes, later: bytes) -> bytes:
    """The proof that two checkpoints of one size contradict each other."""
    return proof.Fork(roots=roots.metadata.roots(), earlier=earlier, later=later, proof=()).to_bytes()


def test_two_sides_of_a_gap_are_no_fork_and_one_side_is(roots: Roots) -> None:
    lost, other = roots.checkpoint(LOST), roots.checkpoint([*KEPT, version(8).body, version(9).body])
    rewritten = roots.checkpoint([deposit(1).body, *KEPT[1:]])
    roots.resume(KEPT, len(LOST))
    resumed = roots.checkpoint(RESUMED[: len(LOST)])
    with pytest.raises(ProofInvalid, match="different sides of a gap"):
        proof.check_fork(fork(roots, lost, resumed), roots.round_id)
    assert proof.check_fork(fork(roots, lost, other), roots.round_id), "of one side"
    same = roots.checkpoint(KEPT)
    assert proof.check_fork(fork(roots, rewritten, same), roots.round_id), "what was kept is kept"


def test_gaps_without_root_keys_without_a_new_ledger_key_or_not_understood_are_refused(roots: Roots) -> None:
    good = roots.gap(KEPT, 5)
    data = rotation.prepare_resumption(roots.metadata, roots.keys, good, utc_now())
    thief = Metadata[Root].from_bytes(data)
    thief.signatures.clear()
    for role in ("targets", "snapshot", "timestamp"):
        thief.sign(roots.keys.signers(roots.metadata.root(), role)[0], append=True)
    chain = roots.metadata.roots()
    with pytest.raises(UntrustedMetadata):
        Keys((*chain, thief.to_bytes()), roots.round_id)
    assert Keys((*chain, data), roots.round_id).gaps
    for wrong in (good | {"size": -1}, good | {"root": "00"}, good | {"lost_size": 2}, {"size": 3}, good | {"more": 1}):
        data = rotation.prepare_resumption(roots.metadata, roots.keys, wrong, utc_now())
        with pytest.raises(UntrustedMetadata, match="declaration is invalid"):
            Keys((*chain, data), roots.round_id)
    root = roots.metadata.root()
    root.version += 1
    root.unrecognized_fields[root_document.RESUMED_FIELD] = good
    with pytest.raises(UntrustedMetadata, match="old ledger key"):
        Keys((*chain, signed(roots, root)), roots.round_id)


def signed(roots: Roots, root: Root) -> bytes:
    document = Metadata(root)
    for key in roots.keys.present(roots.metadata.root(), "root"):
        document.sign(key, append=True)
    return document.to_bytes()


def test_a_ledger_key_of_before_a_gap_never_comes_back(roots: Roots) -> None:
    (old,) = [key for key in roots.keys.all().values() if is_ledger_s(roots, key.public_key.keyval["public"])]
    roots.resume(KEPT, 5)
    root = roots.metadata.root()
    root.version += 1
    del root.unrecognized_fields[root_document.RESUMED_FIELD]
    name_ledger_key(root, old)
    with pytest.raises(UntrustedMetadata, match="before a gap"):
        Keys((*roots.metadata.roots(), signed(roots, root)), roots.round_id)


def is_ledger_s(roots: Roots, public: str) -> bool:
    return public == roots.metadata.ledger_public().hex()


def test_a_gap_is_said_once_and_a_second_one_counts_to_the_smaller_log(roots: Roots) -> None:
    first = roots.checkpoint(LOST)
    roots.resume(KEPT, len(LOST))
    second = roots.checkpoint(RESUMED)
    roots.resume(RESUMED[:4], len(RESUMED))
    third = roots.checkpoint([*RESUMED[:4], version(9).body])
    data = rotation.prepare(roots.metadata, roots.keys, "timestamp", 1, 1, utc_now())
    rotation.install(roots.metadata, roots.keys, data, utc_now())
    keys = roots.read()
    assert [gap.root_version for gap in keys.gaps] == [2, 3], "a rotation after it says nothing of it"
    assert [keys.counts_as(one).size for one in (first, second, third)] == [3, 4, 5]
    with pytest.raises(ProofInvalid, match="different sides of a gap"):
        proof.check_fork(fork(roots, first, second), roots.round_id)


def test_a_witness_that_has_signed_lost_entries_is_answered_that_its_word_is_old(world: World, tmp_path: Path) -> None:
    roots = Roots(tmp_path)
    key, private = named_witness(1)
    lost = witness.cosign(roots.checkpoint(LOST), key, private.sign, 1)
    roots.resume(KEPT, len(LOST))
    reply = world.run(witnesses.record_signature, lost, keys=roots.read(), witnesses=[key], now_ms=10_000)
    assert reply.outcome == "stale"
    assert roots.read().without_lost([lost]) == ()
