"""`swarm-node why --replay` finds what the audit found, and says where it cannot: with the real engine and program."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from coordinator.rules.calibration import SHIPPED, read
from protocol.errors import ProofInvalid
from protocol.policy.chunks import digest
from protocol.policy.manifest import Sampler
from protocol.policy.root_document import Documents
from protocol.wire import canonical
from protocol.wire.signing import NodeKey, open_envelope
from protocol.work.auditing import Explanation, Explanations
from protocol.work.lease import Lease
from protocol.work.rollout import RolloutClaim, pack_tokens
from swarm_node.commands import why
from swarm_node.coordinator_api.join_string import POLICIES, TRUST_FILE, JoinString, round_folder
from swarm_node.engine.messages import GroupDone, SampleRequest
from swarm_node.engine.torch.engine import TorchEngine
from swarm_node.work.records import FILE, LeaseLog
from tests.coordinator.audit.claims import on_round
from tests.swarm_node.worker_world import policy
from tests.tiny_policy import make_tiny_policy

KEY, ROUND = NodeKey(bytes(32)), "0" * 64
JOIN = JoinString("http://127.0.0.1:1", ROUND)
CLASS = "torch/bf16/cpu"
MEASURED = on_round(read(SHIPPED), ROUND).model_dump_json().encode()
SAMPLES, NEW_TOKENS = 32, 64
BEFORE, CLAIMED = 1, 2
STEP = 1e-5


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Two versions, a small step apart: within the noise of the class, but for its direction."""
    before = make_tiny_policy(tmp_path_factory.mktemp("before"))
    claimed = tmp_path_factory.mktemp("claimed") / "policy"
    shutil.copytree(before, claimed)
    weights, chance = claimed / "model.safetensors", torch.Generator().manual_seed(1)
    moved = {
        name: tensor + STEP * torch.randn(tensor.shape, generator=chance).to(tensor.dtype)
        for name, tensor in load_file(weights).items()
    }
    save_file(moved, weights, {"format": "pt"})
    return {BEFORE: before, CLAIMED: claimed}


@pytest.fixture(scope="module")
def explained(policies: dict[int, Path]) -> Explanation:
    """A claim that was sampled with the version before the one that its lease names, and what its audit said of it."""
    terms: dict[str, Any] = {"lease_id": "1" * 32, "version": CLAIMED, "seed": 7}
    prompt = pack_tokens([19, 20, 31])
    lease = Lease(**terms, samples=SAMPLES, prompt=prompt, price_micros_per_mtok=1, expires_ms=1, judged_as=CLASS)
    engine, done = TorchEngine(), list[GroupDone]()
    engine.load(policies[BEFORE], BEFORE)
    request = SampleRequest(
        request_id=lease.lease_id, version=BEFORE, prompt=lease.prompt, seed=lease.seed, samples=SAMPLES,
        max_new_tokens=NEW_TOKENS, temperature=1.0,
    )  # fmt: skip
    engine.generate([request], done.append)
    claim = RolloutClaim(round_id=ROUND, lease_id=lease.lease_id, lease_digest=lease.digest, samples=done[0].samples)
    finding = {"rule": "version", "outcome": "hard fail", "expected": "less", "observed": "more", "positions": []}
    report = {"outcome": "hard fail", "findings": [finding], "fits": [{"version": BEFORE}]}
    return Explanation(
        lease_id=lease.lease_id, claim_id=digest(claim.to_bytes()), state="voided", code="replay_mismatch", said="",
        finding="hard", appeal="", ruling="", report=json.dumps(report).encode(), lease=lease.to_bytes(),
        rollout=KEY.seal("rollout", claim.to_bytes()),
    )  # fmt: skip


def a_home(folder: Path, policies: dict[int, Path], *held: int, lease: Lease) -> Path:
    """A node's, with these versions in it, that was given this lease."""
    here = round_folder(folder, JOIN)
    for version in held:
        shutil.copytree(policies[version], here / POLICIES / f"{version:012d}-{'a' * 16}")
    sampler = Sampler(temperature=1.0, max_new_tokens=NEW_TOKENS)
    manifest = policy(CLAIMED).manifest.model_copy(update={"sampler": sampler})
    documents = Documents(ROUND, root=b"", manifest=manifest.to_bytes(), policy_version=CLAIMED)
    (here / TRUST_FILE).write_bytes(canonical.encode(vars(documents)))
    LeaseLog(here).record([lease])
    return folder


def given(explanation: Explanation) -> Lease:
    return Lease.from_bytes(explanation.lease)


def replayed(home: Path, explanation: Explanation) -> tuple[int, list[str]]:
    found = Explanations(tolerance=CLASS, tolerances=MEASURED, explanations=(explanation,))
    said = list[str]()
    return why.replay(JOIN, home, KEY.node_id, found, said.append), said


def test_a_claim_of_the_version_before_fails_hard_as_it_did_at_the_auditor_and_may_be_replayed_again(
    tmp_path: Path, policies: dict[int, Path], explained: Explanation, capfd: pytest.CaptureFixture[str]
) -> None:
    """The replay ends in a command that can be given again; the folder that it was made in is gone."""
    code, said = replayed(a_home(tmp_path, policies, BEFORE, CLAIMED, lease=given(explained)), explained)
    told = capfd.readouterr().out
    assert (code, said) == (4, []), told
    assert [line.split(",")[0] for line in told.splitlines() if "hard fail: expected" in line] == ["version"], told

    assert told.splitlines()[-1] == why.repeated(explained)
    assert "echo-swarm-case-" not in told


def test_without_the_version_that_the_claim_is_nearer_to_a_replay_is_no_verdict(
    tmp_path: Path, policies: dict[int, Path], explained: Explanation
) -> None:
    """Else it said pass, and the owner appealed against a fault that stands."""
    code, said = replayed(a_home(tmp_path, policies, CLAIMED, lease=given(explained)), explained)
    assert code == 1
    assert f"version {BEFORE}" in said[0]
    assert "no verdict" in said[-1]


def test_a_claim_that_nobody_judged_is_compared_with_the_version_before(
    tmp_path: Path, policies: dict[int, Path], explained: Explanation
) -> None:
    unseen = explained.model_copy(update={"report": b"", "finding": ""})
    code, said = replayed(a_home(tmp_path, policies, BEFORE, CLAIMED, lease=given(unseen)), unseen)
    assert (code, said) == (4, [])


@pytest.mark.parametrize(
    "other",
    [{"prompt": pack_tokens([19, 20, 32])}, {"seed": 8}, {"version": BEFORE}, {"judged_as": ""}, {"expires_ms": 2}],
    ids=lambda other: next(iter(other)),
)
def test_another_lease_than_was_given_is_the_coordinators_fault_and_not_replayed(
    tmp_path: Path,
    policies: dict[int, Path],
    explained: Explanation,
    capfd: pytest.CaptureFixture[str],
    other: dict[str, Any],
) -> None:
    """A coordinator shows the node other terms than it gave it: honest work does not fit them."""
    home = a_home(tmp_path, policies, BEFORE, CLAIMED, lease=given(explained))
    lie = given(explained).model_copy(update=other).to_bytes()
    with pytest.raises(ProofInvalid, match="another lease") as caught:
        replayed(home, explained.model_copy(update={"lease": lie}))
    assert caught.value.fault == "coordinator"
    assert digest(explained.lease) in caught.value.message
    assert capfd.readouterr().out == ""


def test_a_claim_that_another_has_signed_is_not_replayed_as_this_nodes(
    tmp_path: Path, policies: dict[int, Path], explained: Explanation
) -> None:
    home = a_home(tmp_path, policies, BEFORE, CLAIMED, lease=given(explained))
    claim = open_envelope("rollout", explained.rollout).payload
    lie = NodeKey(bytes([1]) * 32).seal("rollout", claim)
    with pytest.raises(ProofInvalid, match="did not sign"):
        replayed(home, explained.model_copy(update={"rollout": lie}))


def test_a_claim_that_the_node_signed_for_another_lease_is_not_replayed_as_this_ones(
    tmp_path: Path, policies: dict[int, Path], explained: Explanation
) -> None:
    home = a_home(tmp_path, policies, BEFORE, CLAIMED, lease=given(explained))
    claim = RolloutClaim.from_bytes(open_envelope("rollout", explained.rollout).payload)
    other = KEY.seal("rollout", claim.model_copy(update={"lease_id": "2" * 32}).to_bytes())
    with pytest.raises(ProofInvalid, match="did not sign"):
        replayed(home, explained.model_copy(update={"rollout": other}))


def test_without_a_note_of_the_lease_the_replay_says_whose_word_the_prompt_is(
    tmp_path: Path, policies: dict[int, Path], explained: Explanation
) -> None:
    home = a_home(tmp_path, policies, BEFORE, CLAIMED, lease=given(explained))
    (round_folder(home, JOIN) / FILE).unlink()
    code, said = replayed(home, explained)
    assert (code, len(said), "its prompt comes from the coordinator" in said[0]) == (4, 1, True)
