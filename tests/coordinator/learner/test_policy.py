"""The policy in training: right numbers, real steps, and checkpoints that no crash can break."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

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


def bf16_folder(policy_folder: Path, target: Path) -> Path:
    """The same policy with bf16 weights."""
    shutil.copytree(policy_folder, target)
    AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.bfloat16).save_pretrained(target)
    return target


def test_a_bf16_policy_is_published_as_bf16_and_trained_in_float32(policy_folder: Path, tmp_path: Path) -> None:
    start = bf16_folder(policy_folder, tmp_path / "start")
    policy = Policy(start, SETTINGS)
    assert {parameter.dtype for parameter in policy.model.parameters()} == {torch.float32}
    policy.train_step(UNEQUAL)
    policy.save_hub(tmp_path / "version")
    published = load_file(tmp_path / "version" / "model.safetensors")
    assert {tensor.dtype for tensor in published.values()} == {torch.bfloat16}
    master = policy.model.state_dict()
    assert all(torch.equal(tensor, master[name].bfloat16()) for name, tensor in published.items())
    assert AutoConfig.from_pretrained(tmp_path / "version").dtype == torch.bfloat16
    assert set(published) == set(load_file(start / "model.safetensors")), "tied weights are stored once"
    assert "lm_head.weight" in master.keys() - published.keys()


def test_updates_too_small_for_bf16_add_up(policy_folder: Path, tmp_path: Path) -> None:
    """In bf16 alone each of them would be rounded away: just below 1 its steps are 1/256."""
    policy = Policy(bf16_folder(policy_folder, tmp_path / "start"), TrainSettings(learning_rate=1e-3, ramp_updates=1))
    weight = policy.model.model.norm.weight
    assert torch.all(weight == 1)
    policy.train_step(fresh(policy, UNEQUAL))
    assert not torch.all(weight == 1)
    assert torch.all(weight.bfloat16() == 1)
    for _ in range(4):
        policy.train_step(fresh(policy, UNEQUAL))
    assert not torch.all(weight.bfloat16() == 1)


def test_publishing_twice_gives_the_same_bytes(policy_folder: Path, tmp_path: Path) -> None:
    policy = Policy(bf16_folder(policy_folder, tmp_path / "start"), SETTINGS)
    policy.train_step(UNEQUAL)
    for name in ("once", "again"):
        policy.save_hub(tmp_path / name)
    once, again = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("once", "again"))
    assert once == again


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
