"""`audit` and `calibrate` on a real round: an honest node, one that ignores its seed, and versions that come and go."""

import json
import shutil
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.config import load
from coordinator.rules.calibration import FILE
from coordinator.service.round import Round
from coordinator.tasks.task_text import TaskText
from coordinator.transactions import checked_rollouts, leases, offers, policy_versions, registry
from coordinator.transactions import claims as intake
from coordinator.transactions.claims import Judge
from coordinator.transactions.offers import PromptDraw
from protocol.errors import AuditFailed, SwarmError
from protocol.policy.chunks import digest
from protocol.tasks import task
from protocol.wire.signing import NodeKey
from protocol.work.fragment import Fragment, FragmentPart
from protocol.work.learning import Publication, UploadedFile
from protocol.work.lease import Lease
from protocol.work.messages import LeaseRequest, Register, ReturnLeases
from protocol.work.rollout import RolloutClaim, Sample
from swarm_node.engine.messages import GroupDone, SampleRequest
from swarm_node.engine.torch.engine import TorchEngine
from tests.tiny_policy import with_canary

SAMPLES, NEW_TOKENS, GROUPS = 64, 64, 3
SETTINGS = f"""
[round]
directory = "round"
[sampling]
samples_per_group = {SAMPLES}
max_new_tokens = {NEW_TOKENS}
"""


@dataclass
class Played:
    """A round that was played: its file, the honest node's claims and the liar's."""

    file: Path
    honest: NodeKey
    claims: list[str]
    lies: list[str]
    shared: list[str]
    """Claim ids of one group that two nodes worked on."""

    def run(self, *words: str) -> tuple[int, str]:
        """A command as an operator types it: its exit code and output."""
        result = CliRunner().invoke(app, list(words))
        if isinstance(result.exception, SwarmError):
            raise result.exception
        assert "Loading weights" not in result.stderr, "a bar of the library's own"
        return result.exit_code, result.stdout


def publish_policy(round_: Round, version: int, policy: Path) -> None:
    """Publish a version as the learner does: the same policy, changed a little for each version."""
    folder = round_.publisher.uploads / str(version)
    shutil.copytree(policy, folder)
    weights = folder / "model.safetensors"
    moved = {name: tensor + 0.002 * version * torch.ones_like(tensor) for name, tensor in load_file(weights).items()}
    save_file(moved, weights, {"format": "pt"})
    with_canary(folder)
    uploads = [UploadedFile(path=path.name, digest=blake3(path.read_bytes()).hexdigest()) for path in folder.iterdir()]
    manifest, name = round_.publisher.publish(Publication(version=version, update=version - 1, files=tuple(uploads)))
    round_.database.run_now(policy_versions.record, manifest, name, now_ms=1)


def play(
    round_: Round, key: NodeKey, version: int, groups: int, *, lie: int = 0, heir: NodeKey | None = None
) -> list[str]:
    """Take leases of a version and answer them with the shipped engine; a liar draws from another seed.

    With an heir the node tells of half of each sample and gives up, and the heir goes on; the claims of both.
    """
    problems = task(round_.config.task.name, seed=0)
    text = TaskText(lambda name: round_.publisher.read_file(version, name), problems, NEW_TOKENS)
    judge = Judge(round_.round_id, round_.terms, text.bounds, text.reward, round_.audits)
    message = Register(name="n", price_micros_per_mtok=1, addresses=(), agent="")
    for each in (key, heir or key):
        round_.database.run_now(registry.register, each.node_id, message, max_price=10, now_ms=1)
    numbers = count(10**6 * lie + 10**3 * bool(heir))
    draw = PromptDraw(prompt=text.prompt, lease_id=lambda: f"{next(numbers):032x}", seed=numbers.__next__)
    wanted = LeaseRequest(version=version, groups=groups)
    given = round_.database.run_now(offers.offer, key.node_id, wanted, terms=round_.terms, draw=draw, now_ms=1)
    engine, done, claims = TorchEngine(), list[GroupDone](), list[str]()
    engine.load(round_.publisher.uploads / str(version), version)
    requests = [
        SampleRequest(
            request_id=lease.lease_id,
            version=version,
            prompt=lease.prompt,
            seed=lease.seed + lie,
            samples=SAMPLES,
            max_new_tokens=NEW_TOKENS,
            temperature=1.0,
        )
        for lease in given.leases
    ]
    engine.generate(requests, done.append)
    samples = {group.request_id: group.samples for group in done}
    for first in given.leases:
        lease, answer, author = first, samples[first.lease_id], key
        if heir:
            claims.append(leave_half(round_, key, first, answer, judge))
            more = wanted.model_copy(update={"groups": 1, "continues": True})
            (lease,) = round_.database.run_now(
                offers.offer, heir.node_id, more, terms=round_.terms, draw=draw, now_ms=2
            ).leases
            answer, author = tuple(cut(sample)[1] for sample in answer), heir
        claim = RolloutClaim(
            round_id=round_.round_id, lease_id=lease.lease_id, lease_digest=lease.digest, samples=answer
        )
        envelope = author.seal("rollout", claim.to_bytes())
        read = checked_rollouts.read_rollouts(author.node_id, [envelope])
        (verdict,) = round_.database.run_now(intake.receive_rollouts, author.node_id, read, judge=judge, now_ms=2)
        assert verdict.outcome == "accepted", verdict
        claims.append(digest(claim.to_bytes()))
    return claims


def cut(sample: Sample) -> tuple[Sample, Sample]:
    """A sample's two halves; the first may be empty."""
    half = 4 * (len(sample.tokens) // 8)
    first = sample.model_copy(update={"tokens": sample.tokens[:half], "logprobs": sample.logprobs[:half]})
    rest = sample.model_copy(update={"tokens": sample.tokens[half:], "logprobs": sample.logprobs[half:]})
    return first, rest


def leave_half(round_: Round, key: NodeKey, lease: Lease, samples: tuple[Sample, ...], judge: Judge) -> str:
    """A node tells of the first halves and gives up; what its claim will be."""
    halves = [(number, cut(sample)[0]) for number, sample in enumerate(samples)]
    parts = tuple(
        FragmentPart(sample=number, start=0, tokens=half.tokens, logprobs=half.logprobs, finish="")
        for number, half in halves
        if half.tokens
    )
    told = Fragment(
        round_id=round_.round_id,
        lease_id=lease.lease_id,
        lease_digest=lease.digest,
        previous="",
        parts=parts,
    )
    words = checked_rollouts.read_fragments(key.node_id, [key.seal("fragment", told.to_bytes())])
    round_.database.run_now(intake.take_progress, key.node_id, [], words, judge=judge, now_ms=2)
    back = ReturnLeases(lease_ids=(lease.lease_id,))
    round_.database.run_now(leases.give_back, key.node_id, back, terms=round_.terms, now_ms=2)
    return digest(told.to_bytes())


@pytest.fixture(scope="module")
def played(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Played:
    """Three versions; the honest node answers under the second, the liar as well."""
    folder = tmp_path_factory.mktemp("played")
    file = folder / "round.toml"
    file.write_text(SETTINGS.replace('"round"', f'"{folder / "round"}"'))
    round_ = Round(load(file, []))
    honest, liar = (NodeKey(bytes([number]) * 32) for number in (1, 2))
    for version in (1, 2):
        publish_policy(round_, version, policy)
    claims = play(round_, honest, 2, GROUPS)
    lies = play(round_, liar, 2, 1, lie=1)
    shared = play(round_, NodeKey(b"\3" * 32), 2, 1, heir=NodeKey(b"\4" * 32))
    publish_policy(round_, 3, policy)
    round_.close()
    return Played(file, honest, claims, lies, shared)


def test_an_honest_claim_passes_and_fits_no_neighbour(played: Played) -> None:
    code, said = played.run("audit", "replay", str(played.file), played.claims[0], "--json")
    found = json.loads(said)
    assert (code, found["outcome"], found["findings"]) == (0, "pass", [])
    assert found["summary"]["dictated_share"] == 1
    assert {fit["version"] for fit in found["fits"]} == {1, 3}
    assert all(abs(fit["lean"]) < 0.1 for fit in found["fits"])


def test_a_resampled_claim_fails_hard_and_the_evidence_can_be_replayed(played: Played) -> None:
    code, said = played.run("audit", "replay", str(played.file), played.lies[0])
    assert code == 4
    assert "tokens, hard fail: expected" in said
    *_, command = said.strip().splitlines()
    assert command.startswith("swarm-coordinator audit replay")
    assert played.run(*command.split()[1:])[0] == 4


def test_an_exported_case_gives_the_same_verdict_elsewhere(played: Played, tmp_path: Path) -> None:
    for claim, expected in ((played.claims[0], 0), (played.lies[0], 4)):
        folder = tmp_path / claim
        assert played.run("audit", "export", str(played.file), claim, str(folder), "--neighbours", "1")[0] == 0
        assert sorted(path.name for path in (folder / "policies").iterdir()) == ["1", "2", "3"]
        assert played.run("audit", "replay", str(folder))[0] == expected


def test_each_claim_to_a_group_that_two_nodes_worked_on_is_replayed_alone(played: Played, tmp_path: Path) -> None:
    positions = []
    for claim in played.shared:
        assert played.run("audit", "export", str(played.file), claim, str(tmp_path / claim))[0] == 0
        code, said = played.run("audit", "replay", str(tmp_path / claim), claim, "--json")
        found = json.loads(said)
        assert (code, found["claim_id"], found["findings"]) == (0, claim, [])
        assert found["summary"]["dictated_share"] == 1
        positions.append((found["node"], found["summary"]["positions"]))
    assert len(dict(positions)) == 2
    assert all(count > 0 for _, count in positions)


def test_a_case_with_an_altered_rollout_is_refused(played: Played, tmp_path: Path) -> None:
    played.run("audit", "export", str(played.file), played.claims[0], str(tmp_path / "case"))
    data = bytearray((tmp_path / "case" / "case").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "case" / "case").write_bytes(data)
    with pytest.raises(SwarmError):
        played.run("audit", "replay", str(tmp_path / "case"))


def test_what_is_not_there_is_named(played: Played, tmp_path: Path) -> None:
    with pytest.raises(AuditFailed, match="No claim"):
        played.run("audit", "replay", str(played.file), "f" * 64)
    with pytest.raises(AuditFailed, match="has no audit case"):
        played.run("audit", "replay", str(tmp_path))
    with pytest.raises(AuditFailed, match="is no class of nodes"):
        played.run("audit", "replay", str(played.file), played.claims[0], "--tolerance", "x/y")
    played.run("audit", "export", str(played.file), played.claims[0], str(tmp_path / "case"), "--neighbours", "0")
    with pytest.raises(AuditFailed, match="another claim"):
        played.run("audit", "replay", str(tmp_path / "case"), played.claims[1])
    shutil.rmtree(tmp_path / "case" / "policies" / "2")
    with pytest.raises(AuditFailed, match="does not have version 2"):
        played.run("audit", "replay", str(tmp_path / "case"))


def test_a_lie_of_a_class_that_was_not_measured_here_is_no_verdict(played: Played) -> None:
    replay = ("audit", "replay", str(played.file), played.lies[0])
    assert played.run(*replay)[0] == 4, "float32's floor holds on every policy"
    code, said = played.run(*replay, "--tolerance", "torch/fp32/cuda")
    assert code == 5
    assert "No fault" in said


def test_calibrating_on_an_honest_node_makes_signed_tolerances_that_audits_use(played: Played) -> None:
    words = ("calibrate", str(played.file), "--node", played.honest.node_id, "--class", "own/fp32/cpu")
    assert played.run(*words)[0] == 0
    replay = ("audit", "replay", str(played.file))
    assert played.run(*replay, played.claims[0], "--tolerance", "own/fp32/cpu")[0] == 0
    assert played.run(*replay, played.lies[0], "--tolerance", "own/fp32/cpu")[0] == 4
    tolerances = load(played.file, []).round.directory / FILE
    sealed = json.loads(tolerances.read_text())
    tolerances.write_text(json.dumps(sealed | {"signatures": []}))
    with pytest.raises(AuditFailed, match="not signed"):
        played.run(*replay, played.claims[0])
    tolerances.unlink()


def test_calibrating_on_nobody_is_refused(played: Played) -> None:
    with pytest.raises(AuditFailed, match="too few"):
        played.run("calibrate", str(played.file), "--node", "0" * 64, "--class", "own/fp32/cpu")
