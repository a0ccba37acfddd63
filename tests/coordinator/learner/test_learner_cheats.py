"""A learner that cheats, and the real log, files and commands that judge it.

- A played round: nodes sign rollouts, batches are formed, the learner's own code trains, and every update is committed.
- Cheats that lie consistently are found by the replay of the update; the others by everybody who reads the log.
- Every update is drawn here. With one of k drawn, a cheat in m updates is found with the chance 1 − (1 − 1/k)^m.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from typer.testing import CliRunner

from coordinator.commands.audit import MISMATCH, app
from coordinator.learner.algorithm import Algorithm, Correction
from coordinator.learner.commitments import document, folder_digests
from coordinator.learner.policy import TrainedPolicy
from coordinator.learner.ranks import machine, software
from coordinator.learner.settings import TrainSettings
from coordinator.publishing.signed_metadata import SignedMetadata
from ledger.entry import Entry, FormedBatch, Pending, UpdateEntry, amount
from ledger.training import groups_root
from ledger.witness import Witnesses
from protocol.errors import ConfigInvalid, ProofInvalid
from protocol.policy import chunks
from protocol.wire.signing import NodeKey
from protocol.work.learning import KeptBatch, TrainingGroup, TrainingSample
from protocol.work.rollout import RolloutClaim, Sample, pack_logprobs, pack_tokens
from swarm_node.commands import audit_learner
from swarm_node.ledger import learner_audit
from swarm_node.ledger.log_reader import LogReader
from swarm_node.ledger.log_verify import ReadLog, verify
from tests.ledger.values import PRICE_MICROS_PER_MTOK, deposit, version
from tests.swarm_node.log_world import Log

KEY = NodeKey(bytes(range(32)))
SETTINGS = TrainSettings(learning_rate=1e-2, warmup_updates=1, algorithm=Algorithm(correction=Correction(mode="none")))
"""No sample is dropped, whatever log-probabilities it has: every group teaches."""
UPDATES, CHEATED = 4, 2
"""The update that a cheat is about, and enough after it that it was drawn."""

Groups = tuple[TrainingGroup, ...]


def rollout(number: int, tokens: tuple[int, ...] = (21, 22, 2)) -> tuple[TrainingGroup, bytes, Pending]:
    """A group that a node signed, and the credit for it."""
    drawn = tuple(
        Sample(
            tokens=pack_tokens([each, *tokens[1:]]),
            logprobs=pack_logprobs([-1.0 - number / 7] * len(tokens)),
            finish="stop",
        )
        for each in tokens[:2]
    )
    claim = RolloutClaim(round_id="a" * 64, lease_id=f"{number:032x}", lease_digest="b" * 64, samples=drawn)
    envelope = KEY.seal("rollout", claim.to_bytes())
    claim_id = chunks.digest(claim.to_bytes())
    samples = tuple(
        TrainingSample(tokens=each.tokens, logprobs=each.logprobs, reward=float(place))
        for place, each in enumerate(drawn)
    )
    group = TrainingGroup(
        claim_id=claim_id, prompt=pack_tokens([19, number % 200, 31]), policy_update=0, samples=samples
    )
    count = len(drawn) * len(tokens)
    credit = Pending(
        claim_id=claim_id,
        lease_id=f"{number:032x}",
        node_id=KEY.node_id,
        tokens=count,
        price_micros_per_mtok=PRICE_MICROS_PER_MTOK,
        amount_micros=amount(count, PRICE_MICROS_PER_MTOK),
    )
    return group, envelope, credit


class PlayedRound:
    """A round whose learner makes `UPDATES` updates, one of them perhaps in its own way."""

    def __init__(self, folder: Path, start: Path) -> None:
        self.folder, self.start = folder, start
        self.log = Log(SignedMetadata.create(folder / "keys", folder / "metadata", 3600.0, datetime.now(UTC)))
        self.log.lies["leaderboard"] = None
        self.log.add([deposit(10**9), version(1)])
        self.policy = TrainedPolicy(start, SETTINGS)
        self.policy.save(folder / "checkpoints")
        self.root = self.policy.rooting()()
        described = {
            "settings": asdict(SETTINGS), "threads": 1, "processes": 1, "kept_one_in": 1,
            "software": software(), "machine": machine("cpu"), "start": folder_digests(start),
        }  # fmt: skip
        self.settings = document(described)
        self.log.lies[f"training/settings/{chunks.digest(self.settings)}"] = self.settings
        self._serve()

    def _serve(self) -> None:
        checkpoint = self.folder / "checkpoints" / "000000000"
        folders = {"start": self.start, "checkpoints/000000000": checkpoint}
        sizes = {name: {file.name: file.stat().st_size for file in path.iterdir()} for name, path in folders.items()}
        self.log.lies["training/kept"] = json.dumps({"folders": sizes}).encode()
        for name, path in folders.items():
            for file in path.iterdir():
                self.log.lies[f"training/{name}/{file.name}/0"] = file.read_bytes()

    def form(self, number: int, change: Callable[[Groups], Groups] = lambda groups: groups) -> Groups:
        """Form a batch of signed groups, which the coordinator may change first."""
        made = [rollout(10 * number + each) for each in range(2)]
        groups = change(tuple(group for group, _, _ in made))
        root = groups_root(group.to_bytes() for group in groups)
        formed = FormedBatch(number=number, groups=len(groups), groups_root=root)
        self.log.add([*(credit for _, _, credit in made), formed])
        signed = {group.claim_id: envelope for group, envelope, _ in made}
        envelopes = tuple(signed.get(group.claim_id, made[0][1]) for group in groups)
        kept = KeptBatch(number=number, groups=groups, rollouts=envelopes)
        self.log.lies[f"training/batches/{number}"] = kept.to_bytes()
        return groups

    def commit(self, number: int, groups: Groups, **change: Any) -> None:
        fields: dict[str, Any] = {
            "update": number, "attempt": 1, "before": self.root, "after": self.policy.rooting()(),
            "groups_root": groups_root(group.to_bytes() for group in groups),
            "settings_digest": chunks.digest(self.settings), "seed": 0, "steps": self.policy.steps, "replaced_by": 0,
        }  # fmt: skip
        self.root = self.policy.rooting()()
        entries: list[Entry] = [UpdateEntry.model_validate(fields | change)]
        self.log.add(entries)

    def play(self, cheat: Callable[["PlayedRound", Groups], Any] | None = None) -> "PlayedRound":
        """Make all updates; `cheat` makes one of them, and commits to it unless it returns False."""
        for number in range(1, UPDATES + 1):
            groups = self.form(number)
            committed = None
            if cheat is not None and number == CHEATED:
                committed = cheat(self, groups)
            else:
                self.policy.train_step(groups)
            if committed is not False:
                self.commit(number, groups)
        return self

    said = ""
    """The output of the last command."""

    def read(self) -> ReadLog:
        """Verify the whole log as `ledger verify` and `audit-learner` do."""
        self.log.lies["leaderboard"] = json.dumps({"ledger_size": 0, "nodes": []}).encode()
        log = ReadLog()
        trio.run(verify, LogReader(self.log), self.log.round_id, Witnesses(), lambda *_: None, log)
        return log

    def audit(self, update: int = CHEATED) -> int:
        """Fetch an update and run the real command on it."""
        log, folder = self.read(), self.folder / "audited"
        assert trio.run(audit_learner.choose, self.log, log, update, None) == [update]
        trio.run(learner_audit.fetch, self.log, log, update, folder, print)
        done = CliRunner().invoke(app, ["update", str(folder)])
        self.said = done.output
        return done.exit_code


@pytest.fixture
def played(tmp_path: Path, policy_folder: Path) -> PlayedRound:
    return PlayedRound(tmp_path, policy_folder)


def test_an_honest_learner_matches_to_the_bit(played: PlayedRound) -> None:
    assert played.play().audit() == 0
    said = played.said
    assert [f"update {number}: the replay ends with the state" in said for number in (1, 2, 3)] == [True, True, False]


def drop_a_group(played: PlayedRound, groups: Groups) -> None:
    played.policy.train_step(groups[:1])


def learn_faster(played: PlayedRound, groups: Groups) -> None:
    faster = TrainedPolicy(played.start, replace(SETTINGS, learning_rate=2e-2))
    played.policy.save(played.folder / "moved")
    faster.restore(played.folder / "moved" / f"{CHEATED - 1:09d}")
    faster.train_step(groups)
    played.policy = faster


def inject_a_batch(played: PlayedRound, _groups: Groups) -> None:
    played.policy.train_step([rollout(999, (40, 41, 2))[0]])


def copy_weights(played: PlayedRound, groups: Groups) -> None:
    played.policy.train_step(groups)
    with torch.no_grad():
        next(iter(played.policy.model.parameters())).mul_(0.5)


def skip_the_work(played: PlayedRound, _groups: Groups) -> None:
    played.policy.update += 1


def alter_rewards(played: PlayedRound, groups: Groups) -> None:
    better = [each.model_copy(update={"reward": 1.0 - each.reward}) for each in groups[0].samples]
    played.policy.train_step([groups[0].model_copy(update={"samples": tuple(better)}), *groups[1:]])


CONSISTENT = (drop_a_group, learn_faster, inject_a_batch, copy_weights, skip_the_work, alter_rewards)


@pytest.mark.parametrize("cheat", CONSISTENT)
def test_a_learner_that_does_something_else_than_it_commits_to_is_found_by_the_replay(
    cheat: Callable[[PlayedRound, Groups], None], played: PlayedRound
) -> None:
    played.play(cheat)
    played.read()  # the log alone shows nothing
    assert played.audit() == MISMATCH
    assert f"update {CHEATED} DOES NOT MATCH" in played.said


def leave_an_update_out(played: PlayedRound, groups: Groups) -> bool:
    played.policy.train_step(groups)
    return False


def commit_to_other_groups(played: PlayedRound, groups: Groups) -> bool:
    played.policy.train_step(groups[:1])
    played.commit(CHEATED, groups[:1])
    return False


def commit_to_other_rewards(played: PlayedRound, groups: Groups) -> bool:
    better = tuple(each.model_copy(update={"reward": 1.0}) for each in groups[0].samples)
    altered = (groups[0].model_copy(update={"samples": better}), *groups[1:])
    played.policy.train_step(altered)
    played.commit(CHEATED, altered)
    return False


def go_on_from_elsewhere(played: PlayedRound, groups: Groups) -> bool:
    played.policy.train_step(groups)
    played.commit(CHEATED, groups)
    with torch.no_grad():
        next(iter(played.policy.model.parameters())).mul_(0.5)
    played.root = played.policy.rooting()()
    return False


@pytest.mark.parametrize(
    ("cheat", "said"),
    [
        (leave_an_update_out, "is not in the log: an update was"),
        (commit_to_other_groups, "groups or rewards were changed after that"),
        (commit_to_other_rewards, "groups or rewards were changed after that"),
        (go_on_from_elsewhere, "the weights or the optimizer were changed in between"),
    ],
)
def test_a_learner_whose_commitments_are_no_chain_is_found_by_everybody_who_reads_the_log(
    cheat: Callable[[PlayedRound, Groups], bool], said: str, played: PlayedRound
) -> None:
    played.play(cheat)
    with pytest.raises(ProofInvalid, match=said):
        played.read()


def with_a_stranger(groups: Groups) -> Groups:
    return (groups[0], rollout(999)[0])


def with_other_tokens(groups: Groups) -> Groups:
    return (groups[0].model_copy(update={"samples": rollout(998)[0].samples}), groups[1])


def with_one_twice(groups: Groups) -> Groups:
    return (groups[0], groups[0])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (with_a_stranger, "no node was credited for"),
        (with_other_tokens, "other samples than its node signed"),
        (with_one_twice, "has a claim twice"),
    ],
)
def test_a_batch_of_groups_that_no_node_signed_is_found_before_the_replay(
    change: Callable[[Groups], Groups], said: str, played: PlayedRound
) -> None:
    for number in range(1, UPDATES + 1):
        groups = played.form(number, change if number == CHEATED else lambda groups: groups)
        played.policy.train_step(groups)
        played.commit(number, groups)
    with pytest.raises(ProofInvalid, match=said):
        played.audit()


@pytest.mark.parametrize("withheld", ["training/batches/1", "training/batches/2"])
def test_what_was_promised_and_is_withheld_is_named(withheld: str, played: PlayedRound) -> None:
    played.play().log.lies[withheld] = None
    with pytest.raises(ProofInvalid, match="the operator promised to keep it, but batch"):
        played.audit()


def test_a_served_checkpoint_that_is_not_the_state_in_the_log_does_not_match(
    played: PlayedRound, tmp_path: Path
) -> None:
    played.play()
    other = TrainedPolicy(played.start, SETTINGS)
    with torch.no_grad():
        next(iter(other.model.parameters())).mul_(0.5)
    other.save(tmp_path / "other")
    for file in (tmp_path / "other" / "000000000").iterdir():
        played.log.lies[f"training/checkpoints/000000000/{file.name}/0"] = file.read_bytes()
    assert played.audit() == MISMATCH
    assert "The checkpoint that is served has the root" in played.said


@pytest.mark.parametrize("file", ["settings", "start"])
def test_other_settings_or_another_start_than_the_logs_are_refused(file: str, played: PlayedRound) -> None:
    played.play()
    if file == "settings":
        played.log.lies[f"training/settings/{chunks.digest(played.settings)}"] = played.settings + b" "
        with pytest.raises(ProofInvalid, match="settings that are served"):
            played.audit()
        return
    played.log.lies["training/start/config.json/0"] = b"{" + b" " * ((played.start / "config.json").stat().st_size - 1)
    assert played.audit() == MISMATCH


def test_an_update_that_was_not_drawn_is_refused_with_those_that_were(played: PlayedRound) -> None:
    log = played.play().read()
    with pytest.raises(ConfigInvalid, match="has not drawn update 4") as refused:
        trio.run(audit_learner.choose, played.log, log, UPDATES, None)
    assert "The newest updates that were drawn: 1, 2." in refused.value.hint
    with pytest.raises(ConfigInvalid, match=f"no update 9999 yet: the newest is {UPDATES}"):
        trio.run(audit_learner.choose, played.log, log, 9999, None)
    assert trio.run(audit_learner.choose, played.log, log, None, 5) == [1, 2]


def test_a_round_that_keeps_no_update_gives_no_verdict(played: PlayedRound) -> None:
    """The command ends with exit code 3 then, not as if it was used wrongly."""
    played.settings = played.settings.replace(b'"kept_one_in":1', b'"kept_one_in":0')
    played.log.lies[f"training/settings/{chunks.digest(played.settings)}"] = played.settings
    log = played.play().read()
    assert trio.run(audit_learner.choose, played.log, log, None, 1) == []


def test_updates_before_the_operator_promised_to_keep_any_are_not_drawn(played: PlayedRound) -> None:
    kept = played.settings
    played.settings = kept.replace(b'"kept_one_in":1', b'"kept_one_in":0')
    played.log.lies[f"training/settings/{chunks.digest(played.settings)}"] = played.settings

    def promise(played: PlayedRound, groups: Groups) -> None:
        played.policy.train_step(groups)
        played.settings = kept

    log = played.play(promise).read()
    assert trio.run(learner_audit.drawn, played.log, log) == [2]
