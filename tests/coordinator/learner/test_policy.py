"""The policy in training: right numbers, real steps, and checkpoints that no crash can break."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from coordinator.learner.batch import collate
from coordinator.learner.grpo import token_logprobs
from coordinator.learner.policy import Policy, TrainSettings, completion_logits
from protocol.learning import TrainingGroup
from protocol.rollout import unpack_tokens
from tests.coordinator.learner.groups import UNEQUAL, group

SETTINGS = TrainSettings(learning_rate=1e-2, ramp_updates=1)


def plain_logprobs(policy: Policy, one: TrainingGroup, sample: int) -> torch.Tensor:
    """What an unpadded forward pass says about one completion: [T]."""
    prompt = unpack_tokens(one.prompt).tolist()
    tokens = unpack_tokens(one.samples[sample].tokens).tolist()
    logits = policy.model(torch.tensor([prompt + tokens])).logits[:, len(prompt) - 1 : -1]
    scores, _ = token_logprobs(logits, torch.tensor([tokens]), 1.0)
    return scores[0]


def fresh(policy: Policy, groups: tuple[TrainingGroup, ...]) -> tuple[TrainingGroup, ...]:
    """The same groups, with the log-probabilities that this policy gives them."""
    return tuple(
        group(
            number,
            unpack_tokens(one.prompt).tolist(),
            [
                (unpack_tokens(sample.tokens).tolist(), plain_logprobs(policy, one, index).tolist(), sample.reward)
                for index, sample in enumerate(one.samples)
            ],
        )
        for number, one in enumerate(groups)
    )


def test_shared_prompts_and_padding_change_no_logprob(policy_folder: Path) -> None:
    policy = Policy(policy_folder, SETTINGS)
    data = collate(UNEQUAL)
    scores, _ = token_logprobs(completion_logits(policy.model, data), data.tokens, 1.0)
    for row in range(6):
        expected = plain_logprobs(policy, UNEQUAL[row // 2], row % 2)
        assert (scores[row, : len(expected)] - expected).abs().max() < 1e-5


def test_the_gradient_reaches_the_prompt(policy_folder: Path) -> None:
    """The cache that the samples share must not cut the graph."""
    policy = Policy(policy_folder, SETTINGS)
    data = collate(UNEQUAL[:1])
    scores, _ = token_logprobs(completion_logits(policy.model, data), data.tokens, 1.0)
    (scores * data.mask).sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    shared = policy.model.model.embed_tokens.weight.grad[[19, 20]].clone()
    policy.model.zero_grad()
    apart = torch.cat([plain_logprobs(policy, UNEQUAL[0], sample) for sample in (0, 1)])
    apart.sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    assert torch.allclose(shared, policy.model.model.embed_tokens.weight.grad[[19, 20]], atol=1e-4)


def test_a_step_makes_rewarded_completions_likelier(policy_folder: Path) -> None:
    policy = Policy(policy_folder, SETTINGS)
    groups = fresh(policy, UNEQUAL)
    before = plain_logprobs(policy, groups[0], 0).sum() - plain_logprobs(policy, groups[0], 1).sum()
    step = policy.train_step(groups)
    after = plain_logprobs(policy, groups[0], 0).sum() - plain_logprobs(policy, groups[0], 1).sum()
    assert after > before
    assert policy.update == 1
    assert step.metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert step.metrics["kl"] == pytest.approx(0.0, abs=1e-6)
    assert step.metrics["groups_with_signal"] == pytest.approx(2 / 3)
    assert all(distance < 1e-4 for distance in step.distances.values())


def test_a_claim_with_invented_logprobs_stands_out(policy_folder: Path) -> None:
    policy = Policy(policy_folder, SETTINGS)
    honest = fresh(policy, UNEQUAL)
    liar = group(9, [19, 20, 31], [([21, 22, 2], [-0.01] * 3, 1.0), ([23, 2], [-0.01] * 2, 0.0)])
    distances = policy.train_step([*honest, liar]).distances
    assert distances.pop(liar.claim_id) > 3
    assert max(distances.values()) < 1e-4


def test_a_batch_without_signal_changes_no_weight(policy_folder: Path) -> None:
    policy = Policy(policy_folder, SETTINGS)
    before = [tensor.clone() for tensor in policy.model.parameters()]
    policy.train_step(UNEQUAL[2:])
    assert all(torch.equal(old, new) for old, new in zip(before, policy.model.parameters(), strict=True))


def test_a_published_folder_is_the_policy_as_it_stands(policy_folder: Path, tmp_path: Path) -> None:
    policy = Policy(policy_folder, SETTINGS)
    policy.train_step(UNEQUAL)
    policy.save_hub(tmp_path / "version")
    published = AutoModelForCausalLM.from_pretrained(tmp_path / "version")
    assert all(
        torch.equal(ours, theirs)
        for ours, theirs in zip(policy.model.parameters(), published.parameters(), strict=True)
    )
    assert AutoTokenizer.from_pretrained(tmp_path / "version")("1+2=").input_ids == [19, 13, 20, 31]
    assert {path.name for path in (tmp_path / "version").iterdir()} == {path.name for path in policy_folder.iterdir()}


def test_the_step_after_a_restore_is_bit_for_bit_the_same(policy_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    straight = Policy(policy_folder, SETTINGS)
    straight.train_step(UNEQUAL)
    straight.save_checkpoint(path)
    expected = straight.train_step(UNEQUAL)

    resumed = Policy(policy_folder, SETTINGS)
    resumed.restore_checkpoint(path)
    assert resumed.update == 1
    assert resumed.train_step(UNEQUAL) == expected
    assert all(
        torch.equal(one, other)
        for one, other in zip(straight.model.parameters(), resumed.model.parameters(), strict=True)
    )


WRITER = """
import sys
from pathlib import Path
import torch
from coordinator.learner.policy import Policy, TrainSettings

torch.set_num_threads(1)
policy = Policy(Path(sys.argv[1]), TrainSettings(learning_rate=1e-3))
print("ready", flush=True)
while True:
    policy.update += 1
    policy.save_checkpoint(Path(sys.argv[2]))
    print(policy.update, flush=True)
"""


@pytest.mark.processes
def test_kill_9_while_checkpoints_are_written_leaves_a_whole_one(policy_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    command = [sys.executable, "-c", WRITER, str(policy_folder), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        survivors: list[tuple[int, Path]] = []
        told = 0
        for _ in range(6):  # snapshots of the folder at arbitrary moments stand for as many kills
            told = int(writer.stdout.readline())
            survivors.append((told, shutil.copyfile(path, tmp_path / f"survivor {told}")))
        survivors.append((told, path))
        os.kill(writer.pid, signal.SIGKILL)
    policy = Policy(policy_folder, SETTINGS)
    for reported, survivor in survivors:
        policy.restore_checkpoint(survivor)
        assert policy.update >= reported, "a checkpoint that was reported is gone"
    policy.save_checkpoint(path)  # what the kill left half-written is in nobody's way
    assert sorted(entry.name for entry in tmp_path.iterdir() if "survivor" not in entry.name) == ["checkpoint"]
