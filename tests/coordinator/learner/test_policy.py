"""The policy in training: right numbers, real steps, and checkpoints that no crash can break."""

import json
import shutil
from dataclasses import replace
from math import inf, isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from coordinator.learner.algorithm import PRESETS, Algorithm, Correction
from coordinator.learner.policy import TrainedPolicy
from coordinator.learner.publication import scores
from coordinator.learner.settings import TrainSettings
from coordinator.model.batch import collate
from coordinator.pages import metric_words
from protocol.errors import ConfigInvalid
from protocol.policy import canary
from protocol.work.learning import Earlier, TrainingGroup
from protocol.work.rollout import pack_logprobs, unpack_tokens
from tests.coordinator.learner.groups import UNEQUAL, group

SETTINGS = TrainSettings(learning_rate=1e-2, warmup_updates=1)


def plain_logprobs(policy: TrainedPolicy, one: TrainingGroup, sample: int) -> torch.Tensor:
    """Return the log-probabilities of a completion from an unpadded forward pass: [T]."""
    prompt = unpack_tokens(one.prompt).tolist()
    tokens = unpack_tokens(one.samples[sample].tokens).tolist()
    logits = policy.model(torch.tensor([prompt + tokens])).logits[:, len(prompt) - 1 : -1]
    chosen: torch.Tensor = logits[0].log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return chosen.detach()


def fresh(policy: TrainedPolicy, groups: tuple[TrainingGroup, ...]) -> tuple[TrainingGroup, ...]:
    """Return the groups with the log-probabilities that this policy gives them."""
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


def test_a_step_makes_rewarded_completions_likelier(policy_folder: Path) -> None:
    policy = TrainedPolicy(policy_folder, SETTINGS)
    groups = fresh(policy, UNEQUAL)
    before = plain_logprobs(policy, groups[0], 0).sum() - plain_logprobs(policy, groups[0], 1).sum()
    step = policy.train_step(groups)
    after = plain_logprobs(policy, groups[0], 0).sum() - plain_logprobs(policy, groups[0], 1).sum()
    assert after > before
    assert policy.update == 1
    assert step.metrics["is/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert step.metrics["kl/k3"] == pytest.approx(0.0, abs=1e-6)
    assert step.metrics["reward/signal"] == pytest.approx(2 / 3)
    assert all(distance < 1e-4 for distance in step.distances.values())


def test_token_0_may_be_the_end(policy_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(policy_folder, folder := tmp_path / "policy")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    assert TrainedPolicy(folder, SETTINGS).ends == [0]


def test_a_claim_with_invented_logprobs_stands_out(policy_folder: Path) -> None:
    policy = TrainedPolicy(policy_folder, SETTINGS)
    honest = fresh(policy, UNEQUAL)
    liar = group(9, [19, 20, 31], [([21, 22, 2], [-0.01] * 3, 1.0), ([23, 2], [-0.01] * 2, 0.0)])
    distances = policy.train_step([*honest, liar]).distances
    assert distances.pop(liar.claim_id) > 3
    assert max(distances.values()) < 1e-4


def test_infinity_where_nothing_was_drawn_hides_no_distance_and_stops_no_step(policy_folder: Path) -> None:
    policy = TrainedPolicy(policy_folder, SETTINGS)
    one = group(9, [19, 20, 31], [([21, 22, 2], [-0.01, -inf, -0.01], 1.0), ([23, 2], [-0.01] * 2, 0.0)])
    episode = one.samples[0].model_copy(update={"sampled": b"\1\0\1"})
    step = policy.train_step([one.model_copy(update={"samples": (episode, one.samples[1])})])
    assert 3 < step.distances[one.claim_id] < inf
    assert step.metrics["learner/skipped"] == 0.0
    assert all(isfinite(value) for value in step.metrics.values())


def test_infinity_of_whoever_began_is_not_held_against_whoever_finished(policy_folder: Path) -> None:
    policy = TrainedPolicy(policy_folder, SETTINGS)
    (whole,) = fresh(policy, UNEQUAL[:1])
    samples = tuple(
        sample.model_copy(update={"logprobs": pack_logprobs([-inf]) + sample.logprobs[4:]}) for sample in whole.samples
    )
    began = Earlier(claim_id=f"{8:064x}", ends=(1, 1))
    both = whole.model_copy(update={"samples": samples, "earlier": (began,)})
    distances = policy.train_step([both]).distances
    assert distances[began.claim_id] == inf
    assert distances[whole.claim_id] < 1e-4


def _with_rewards_times(factor: float, one: TrainingGroup) -> TrainingGroup:
    samples = tuple(sample.model_copy(update={"reward": factor * sample.reward}) for sample in one.samples)
    return one.model_copy(update={"samples": samples})


def test_an_update_says_how_long_its_answers_are_and_how_many_were_cut(policy_folder: Path) -> None:
    """One of six answers does not end with token 2; what an environment says in an episode has no length."""
    one = group(3, [31], [([21, 22, 23, 2], [-1.0] * 4, 1.0), ([2], [-1.0], 0.0)])
    episode = one.samples[0].model_copy(update={"sampled": b"\1\0\0\1"})
    groups = [*UNEQUAL[:2], one.model_copy(update={"samples": (episode, one.samples[1])})]
    metrics = TrainedPolicy(policy_folder, SETTINGS).train_step(groups).metrics
    assert metrics.keys() <= metric_words.KNOWN  # a page explains each of them
    assert metrics["length/mean"] == pytest.approx((3 + 2 + 1 + 4 + 2 + 1) / 6)
    assert metrics["length/max"] == 4.0
    assert metrics["length/truncated"] == pytest.approx(1 / 6)


def test_the_gradient_of_an_update_is_the_largest_of_its_steps(policy_folder: Path) -> None:
    """A gradient that explodes in the first of several steps is clipped, and must be seen all the same."""
    loud = group(0, [19, 20, 31], [([21, 22, 2], [-1.0] * 3, 1e6), ([23, 2], [-1.0] * 2, -1e6)])
    quiet = group(1, [19, 31], [([21, 2], [-1.0] * 2, 1e-3), ([23, 2], [-1.0] * 2, 0.0)])
    algorithm = Algorithm(scale_rewards="none", minibatches=2, correction=Correction(mode="none"))
    policy = TrainedPolicy(policy_folder, replace(SETTINGS, algorithm=algorithm))
    assert policy.train_step([loud, quiet]).metrics["learner/grad_norm"] > 1e4


def test_a_batch_that_the_correction_drops_is_counted(policy_folder: Path) -> None:
    policy = TrainedPolicy(policy_folder, SETTINGS)
    groups = fresh(policy, UNEQUAL)
    assert policy.train_step(groups).metrics["learner/empty"] == 0.0
    far = [
        one.model_copy(
            update={
                "samples": tuple(
                    sample.model_copy(update={"logprobs": pack_logprobs([-30.0] * (len(sample.logprobs) // 4))})
                    for sample in one.samples
                )
            }
        )
        for one in groups
    ]
    step = policy.train_step(far)
    assert (step.metrics["is/masked_frac"], step.metrics["learner/grad_norm"]) == (1.0, 0.0)
    assert (step.metrics["learner/empty"], step.metrics["learner/skipped"]) == (1.0, 0.0)
    assert policy.train_step(fresh(policy, UNEQUAL)).metrics["learner/empty"] == 0.0


def test_a_batch_of_equal_rewards_makes_no_step_and_is_counted(policy_folder: Path) -> None:
    policy = TrainedPolicy(policy_folder, SETTINGS)
    policy.train_step(fresh(policy, UNEQUAL))
    equal = [
        one.model_copy(update={"samples": tuple(sample.model_copy(update={"reward": 1.0}) for sample in one.samples)})
        for one in fresh(policy, UNEQUAL)
    ]
    before = [weight.detach().clone() for weight in policy.model.parameters()]
    assert policy.train_step(equal).metrics["learner/empty"] == 1.0
    assert policy.steps == 1
    assert all(map(torch.equal, before, policy.model.parameters()))


def test_a_gradient_that_is_not_finite_changes_nothing_and_the_next_one_does(policy_folder: Path) -> None:
    policy = TrainedPolicy(policy_folder, replace(SETTINGS, algorithm=Algorithm(scale_rewards="none")))
    before = [tensor.clone() for tensor in policy.model.parameters()]
    groups = fresh(policy, UNEQUAL)
    step = policy.train_step([_with_rewards_times(3e38, one) for one in groups])
    assert step.metrics["learner/skipped"] == 1.0
    assert all(torch.equal(old, new) for old, new in zip(before, policy.model.parameters(), strict=True))
    assert policy.update == 1
    step = policy.train_step(groups)
    assert step.metrics["learner/skipped"] == 0.0
    assert not all(torch.equal(old, new) for old, new in zip(before, policy.model.parameters(), strict=True))


def test_a_batch_without_signal_changes_no_weight(policy_folder: Path) -> None:
    policy = TrainedPolicy(policy_folder, SETTINGS)
    before = [tensor.clone() for tensor in policy.model.parameters()]
    policy.train_step(UNEQUAL[2:])
    assert all(torch.equal(old, new) for old, new in zip(before, policy.model.parameters(), strict=True))


def test_a_published_folder_is_the_policy_as_it_stands(policy_folder: Path, tmp_path: Path) -> None:
    policy = TrainedPolicy(policy_folder, SETTINGS)
    policy.train_step(UNEQUAL)
    policy.writer.save_hub(tmp_path / "version")
    published = AutoModelForCausalLM.from_pretrained(tmp_path / "version")
    assert all(
        torch.equal(ours, theirs)
        for ours, theirs in zip(policy.model.parameters(), published.parameters(), strict=True)
    )
    assert AutoTokenizer.from_pretrained(tmp_path / "version")("1+2=").input_ids == [19, 13, 20, 31]
    assert {path.name for path in (tmp_path / "version").iterdir()} == {path.name for path in policy_folder.iterdir()}


def bf16_folder(policy_folder: Path, target: Path) -> Path:
    """Write the policy with bf16 weights."""
    shutil.copytree(policy_folder, target)
    AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.bfloat16).save_pretrained(target)
    return target


def test_a_bf16_policy_is_published_as_bf16_and_trained_in_float32(policy_folder: Path, tmp_path: Path) -> None:
    start = bf16_folder(policy_folder, tmp_path / "start")
    policy = TrainedPolicy(start, SETTINGS)
    assert {parameter.dtype for parameter in policy.model.parameters()} == {torch.float32}
    policy.train_step(fresh(policy, UNEQUAL))
    policy.writer.save_hub(tmp_path / "version")
    published = load_file(tmp_path / "version" / "model.safetensors")
    assert {tensor.dtype for tensor in published.values()} == {torch.bfloat16}
    master = policy.model.state_dict()
    step = 2.0**-7  # of a bfloat16, as a share of the number
    assert all(torch.all((low - master[name]).abs() <= step * master[name].abs()) for name, low in published.items())
    assert AutoConfig.from_pretrained(tmp_path / "version").dtype == torch.bfloat16
    assert set(published) == set(load_file(start / "model.safetensors")), "tied weights are stored once"
    assert "lm_head.weight" in master.keys() - published.keys()


def test_the_canary_of_a_bf16_version_is_computed_with_the_numbers_in_its_files(
    policy_folder: Path, tmp_path: Path
) -> None:
    """Also with those of the embeddings, which the output layer shares under another name."""
    policy = TrainedPolicy(bf16_folder(policy_folder, tmp_path / "start"), SETTINGS)
    policy.train_step(fresh(policy, UNEQUAL))
    policy.writer.save_hub(tmp_path / "version")
    told = json.loads((tmp_path / "version" / canary.FILE_NAME).read_text())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "version", dtype=torch.float32)
    with torch.no_grad():
        found = scores(model, torch.tensor(told["tokens"]), None)
    assert found.tolist() == pytest.approx(told["logprobs"], abs=1e-6)


def test_updates_too_small_for_bf16_add_up(policy_folder: Path, tmp_path: Path) -> None:
    """Alone in bf16 each update would be rounded away: just below 1 its steps are 1/256."""
    policy = TrainedPolicy(
        bf16_folder(policy_folder, tmp_path / "start"), TrainSettings(learning_rate=1e-3, warmup_updates=1)
    )
    weight = policy.model.model.norm.weight
    assert torch.all(weight == 1)
    policy.train_step(fresh(policy, UNEQUAL))
    assert not torch.all(weight == 1)
    assert torch.all(weight.bfloat16() == 1)
    for _ in range(4):
        policy.train_step(fresh(policy, UNEQUAL))
    assert not torch.all(weight.bfloat16() == 1)


def test_publishing_twice_gives_the_same_bytes(policy_folder: Path, tmp_path: Path) -> None:
    policy = TrainedPolicy(bf16_folder(policy_folder, tmp_path / "start"), SETTINGS)
    policy.train_step(UNEQUAL)
    for name in ("once", "again"):
        policy.writer.save_hub(tmp_path / name)
    once, again = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("once", "again"))
    assert once == again


def test_the_step_after_a_restore_is_bit_for_bit_the_same(policy_folder: Path, tmp_path: Path) -> None:
    straight = TrainedPolicy(policy_folder, SETTINGS)
    straight.train_step(UNEQUAL)
    straight.save(tmp_path)
    expected = straight.train_step(UNEQUAL)

    resumed = TrainedPolicy(policy_folder, SETTINGS)
    resumed.restore(tmp_path / "000000001")
    assert resumed.update == 1
    assert resumed.train_step(UNEQUAL) == expected
    assert all(
        torch.equal(one, other)
        for one, other in zip(straight.model.parameters(), resumed.model.parameters(), strict=True)
    )


def trained(folder: Path, groups: tuple[TrainingGroup, ...], updates: int = 1, **changes: Any) -> list[torch.Tensor]:
    """The weights after some updates."""
    policy = TrainedPolicy(folder, replace(SETTINGS, **changes))
    for _ in range(updates):
        policy.train_step(groups)
    return [weight.detach() for weight in policy.model.parameters()]


def gradient(folder: Path, groups: tuple[TrainingGroup, ...], **changes: Any) -> torch.Tensor:
    """The gradient of one update, all weights in a row."""
    policy = TrainedPolicy(folder, replace(SETTINGS, max_grad_norm=1e9, **changes))
    found: list[torch.Tensor] = []

    def record(*_: Any) -> None:
        found.append(torch.cat([weight.grad.flatten() for weight in policy.model.parameters()]))

    policy._optimizer.register_step_pre_hook(record)
    policy.train_step(groups)
    assert all(weight.grad is None for weight in policy.model.parameters()), "gradients are kept after the step"
    return found[0]


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_micro_batches_have_the_gradient_of_the_whole(policy_folder: Path, name: str) -> None:
    groups = fresh(TrainedPolicy(policy_folder, SETTINGS), UNEQUAL)
    algorithm = replace(PRESETS[name], minibatches=1)
    whole = gradient(policy_folder, groups, algorithm=algorithm)
    parts = gradient(policy_folder, groups, algorithm=algorithm, micro_batch_tokens=6)
    assert whole.norm() > 0 or name == "dapo"
    assert torch.allclose(whole, parts, atol=1e-6 * float(whole.norm() + 1))


def test_layers_computed_twice_have_the_same_gradient(policy_folder: Path) -> None:
    groups = fresh(TrainedPolicy(policy_folder, SETTINGS), UNEQUAL)
    assert torch.allclose(
        gradient(policy_folder, groups), gradient(policy_folder, groups, gradient_checkpointing=True), atol=1e-6
    )


def test_products_in_bf16_point_the_same_way(policy_folder: Path) -> None:
    groups = fresh(TrainedPolicy(policy_folder, SETTINGS), UNEQUAL)
    fine, coarse = (gradient(policy_folder, groups, dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert coarse.dtype == torch.float32
    assert torch.cosine_similarity(fine, coarse, dim=0) > 0.99
    assert not torch.equal(fine, coarse)


def test_samples_that_teach_nothing_change_nothing_and_are_still_checked(policy_folder: Path) -> None:
    groups = fresh(TrainedPolicy(policy_folder, SETTINGS), UNEQUAL)
    token_mean = Algorithm(loss_aggregation="constant")  # whose shares of the others do not depend on the last group
    alone = gradient(policy_folder, groups[:2], algorithm=token_mean)
    beside = gradient(policy_folder, groups, algorithm=token_mean)
    assert torch.allclose(alone * 4 / 6, beside, atol=1e-6)
    policy = TrainedPolicy(policy_folder, SETTINGS)
    assert set(policy.train_step(groups).distances) == {one.claim_id for one in groups}


def test_skipped_tokens_teach_nothing_and_no_share_is_kept_for_them(policy_folder: Path) -> None:
    """A sample of which one token is left is trained as one of that token alone, after the same beginning."""
    both = [([21, 22, 2], [-1.0] * 3, 1.0), ([23, 24, 2], [-1.0] * 3, 0.0)]
    whole = group(0, [19, 20, 31], both)
    skipped = tuple(sample.model_copy(update={"skip": ((0, 1), (2, 3))}) for sample in whole.samples)
    policy = TrainedPolicy(policy_folder, replace(SETTINGS, max_grad_norm=1e9))
    data = collate([whole.model_copy(update={"samples": skipped})])
    terms = policy._terms(data)
    assert terms.mask.tolist() == [[0, 1, 0], [0, 1, 0]]
    assert terms.shares.tolist() == [[0, 0.5, 0], [0, 0.5, 0]]
    nothing = tuple(sample.model_copy(update={"skip": ((0, 3),)}) for sample in whole.samples)
    metrics = policy.train_step([whole.model_copy(update={"samples": nothing})]).metrics
    assert metrics["learner/grad_norm"] == 0.0


def test_entropy_is_that_of_every_drawn_token_before_the_update(policy_folder: Path) -> None:
    """Tokens that are not trained on, and those of groups without signal, count like any other."""
    policy = TrainedPolicy(
        policy_folder, replace(SETTINGS, num_iterations=2, temperature=0.7, algorithm=PRESETS["dapo"])
    )
    expected = []
    for one in UNEQUAL:
        prompt = unpack_tokens(one.prompt).tolist()
        for sample in one.samples:
            tokens = unpack_tokens(sample.tokens).tolist()
            logits = policy.model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1] / 0.7
            scores = logits.detach().log_softmax(-1)
            expected += (-scores.exp() * scores).sum(-1).tolist()
    skipped = [tuple(sample.model_copy(update={"skip": ((0, 1),)}) for sample in one.samples) for one in UNEQUAL]
    groups = [one.model_copy(update={"samples": samples}) for one, samples in zip(UNEQUAL, skipped, strict=True)]
    assert policy.train_step(groups).metrics["entropy"] == pytest.approx(sum(expected) / len(expected), abs=1e-5)


def test_only_chosen_samples_are_trained_on(policy_folder: Path) -> None:
    """The pair of samples with the greatest contrast is chosen of four; the gradient is that of these two."""
    rewards = [1.0, 0.5, 0.25, 0.0]
    four = (group(0, [19, 20, 31], [([21 + number, 2], [-1.0, -1.0], one) for number, one in enumerate(rewards)]),)
    pairs = replace(PRESETS["echo2"], trajectories="pairs", trajectory_share=0.5)
    policy = TrainedPolicy(policy_folder, replace(SETTINGS, algorithm=pairs))
    assert policy.train_step(four).metrics["reward/taught"] == 0.5
    some, every = (gradient(policy_folder, four, algorithm=one) for one in (pairs, PRESETS["echo2"]))
    assert some.any()
    assert not torch.allclose(some, every)


def test_truncated_samples_and_groups_without_signal_are_left_out_by_dapo(policy_folder: Path) -> None:
    groups = fresh(TrainedPolicy(policy_folder, SETTINGS), UNEQUAL)  # the sample of four tokens has no end token
    dapo = replace(PRESETS["dapo"], minibatches=1)
    found = gradient(policy_folder, groups, algorithm=dapo)
    cut = (groups[0], group(1, [19, 20, 13, 21, 31], [([2], [-4.0], 0.0), ([24, 2], [-1.0, -1.0], 1.0)]))
    by_hand = replace(dapo, mask_truncated_completions=False, filter_zero_variance=False)
    kept = gradient(policy_folder, fresh(TrainedPolicy(policy_folder, SETTINGS), cut), algorithm=by_hand)
    assert not torch.allclose(found, kept), "the truncated sample said something"
    step = TrainedPolicy(policy_folder, replace(SETTINGS, algorithm=dapo)).train_step(groups)
    assert step.metrics["tokens"] == 14, "what is left out is still counted as sampled"


def test_a_second_step_on_a_batch_is_clipped_around_the_first(policy_folder: Path) -> None:
    groups = fresh(TrainedPolicy(policy_folder, SETTINGS), UNEQUAL)
    policy = TrainedPolicy(policy_folder, replace(SETTINGS, num_iterations=3))
    step = policy.train_step(groups)
    assert policy.update == 1
    assert step.metrics["is/ratio_mean"] == pytest.approx(1.0, abs=1e-4), "π_old is the policy before the update"
    assert step.metrics["clip/low"] + step.metrics["clip/high"] > 0, "steps of this size leave the trust region"


def test_divergence_from_the_start_pulls_back(policy_folder: Path) -> None:
    groups = fresh(TrainedPolicy(policy_folder, SETTINGS), UNEQUAL)
    start = trained(policy_folder, groups, 0)

    def moved(beta: float) -> float:
        after = trained(
            policy_folder, groups, 5, algorithm=Algorithm(beta=beta, correction=PRESETS["echo2"].correction)
        )
        return sum(float((old - new).square().sum()) for old, new in zip(start, after, strict=True))

    assert moved(10.0) < moved(0.0)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 0.75, 0.5, 0.25, 0.0]),
        ("cosine", [0.5, 0.854, 0.5, 0.146, 0.0]),
    ],
)
def test_the_rate_rises_and_falls(schedule: Any, expected: list[float]) -> None:
    settings = TrainSettings(learning_rate=1.0, warmup_updates=2, schedule=schedule, max_updates=4)
    assert [settings.rate(update, update) for update in range(5)] == pytest.approx(expected, abs=1e-3)


def test_the_rate_rises_by_the_updates_that_the_optimizer_has_seen() -> None:
    settings = TrainSettings(learning_rate=1.0, warmup_updates=4, num_iterations=3)
    assert [settings.rate(50, steps) for steps in (0, 3, 6, 9, 12)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    split = replace(settings, algorithm=Algorithm(minibatches=2))
    assert [split.rate(50, steps) for steps in (0, 6, 12, 18, 24)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_the_rate_waits_for_steps_that_were_not_made(policy_folder: Path) -> None:
    """The scale of gradients is still unknown: the first gradient that comes is still the first."""
    policy = TrainedPolicy(
        policy_folder, replace(SETTINGS, warmup_updates=4, algorithm=Algorithm(scale_rewards="none"))
    )
    groups = fresh(policy, UNEQUAL)
    batches = [[_with_rewards_times(3e38, one) for one in groups], groups[2:], groups, groups]
    found = [policy.train_step(batch).metrics["learner/learning_rate"] for batch in batches]
    assert found == pytest.approx([0.0025, 0.0025, 0.0025, 0.005])


def test_lora_trains_adapters_alone_and_publishes_merged_weights(policy_folder: Path, tmp_path: Path) -> None:
    policy = TrainedPolicy(policy_folder, replace(SETTINGS, lora_rank=4))
    groups = fresh(policy, UNEQUAL)
    base = [weight.clone() for weight in policy.model.parameters()]
    for _ in range(3):
        policy.train_step(groups)
    assert all(torch.equal(old, new) for old, new in zip(base, policy.model.parameters(), strict=True))
    policy.writer.save_hub(tmp_path / "version")
    published = AutoModelForCausalLM.from_pretrained(tmp_path / "version")
    text = torch.tensor([[19, 20, 31, 21, 22, 2]])
    assert torch.allclose(published(text).logits, policy.model(text).logits, atol=1e-5)
    said = json.loads((tmp_path / "version" / canary.FILE_NAME).read_text())
    words = torch.tensor([said["tokens"]])
    scores = published(words).logits[0, :-1].log_softmax(-1).gather(1, words[0, 1:, None])[:, 0]
    assert torch.allclose(scores, torch.tensor(said["logprobs"]), atol=1e-4), "the canary is of other weights"
    assert not torch.allclose(
        published(text).logits, AutoModelForCausalLM.from_pretrained(policy_folder)(text).logits, atol=1e-3
    )


def test_lora_resumes_bit_for_bit(policy_folder: Path, tmp_path: Path) -> None:
    settings = replace(SETTINGS, lora_rank=4, learning_rate=1e-1)
    straight = TrainedPolicy(policy_folder, settings)
    groups = fresh(straight, UNEQUAL)
    straight.train_step(groups)
    straight.save(tmp_path)
    expected = straight.train_step(groups)
    resumed = TrainedPolicy(policy_folder, settings)
    resumed.restore(tmp_path / "000000001")
    assert resumed.train_step(groups) == expected
    with pytest.raises(ConfigInvalid, match="cannot be read as a checkpoint of this policy"):
        TrainedPolicy(policy_folder, SETTINGS).restore(tmp_path / "000000001")


def test_a_copy_of_a_gguf_file_that_calls_itself_a_tokenizer_is_not_published(
    policy_folder: Path, tmp_path: Path
) -> None:
    """transformers writes one, of 98 MB for SmolLM2, when it converts a GGUF file."""
    folder = shutil.copytree(policy_folder, tmp_path / "policy")
    (folder / "tokenizer.model").write_bytes(b"GGUF" + bytes(1000))
    (folder / "special_tokens_map.json").write_text("{}")
    TrainedPolicy(folder, SETTINGS).writer.save_hub(tmp_path / "version")
    names = {file.name for file in (tmp_path / "version").iterdir()}
    assert "special_tokens_map.json" in names
    assert "tokenizer.model" not in names


def test_a_canary_is_text_where_the_tokenizer_writes_it(policy_folder: Path, tmp_path: Path) -> None:
    policy = TrainedPolicy(policy_folder, SETTINGS)
    policy.writer.save_hub(tmp_path / "version")
    said = canary.Canary.from_value(json.loads((tmp_path / "version" / canary.FILE_NAME).read_text()))
    tokenizer: Any = AutoTokenizer.from_pretrained(policy_folder)
    assert len(said.tokens) == len(said.logprobs) + 1 == len(said.bfloat16) + 1 == len(said.float16) + 1
    written = canary.is_written(said.tokens, tokenizer.decode(list(said.tokens)))
    assert written or said.tokens == canary.spread(policy.model.config.vocab_size)
