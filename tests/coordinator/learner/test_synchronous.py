"""Synchronous training: with S = 0 the same seeds give the weights of the synchronous loop, to float tolerance."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from coordinator.learner.policy import TrainedPolicy
from coordinator.learner.settings import TrainSettings
from coordinator.rules.prompt_refs import PromptRef
from coordinator.store import tables
from protocol.tasks import Reward
from protocol.wire.signing import NodeKey
from protocol.work.fragment import FragmentPart
from protocol.work.learning import TrainingGroup, TrainingSample
from protocol.work.lease import Lease
from protocol.work.rollout import PolicyBounds, Sample, unpack_tokens
from swarm_node.engine.messages import SampleRequest
from swarm_node.engine.torch.engine import TorchEngine
from tests.coordinator.world import MAX_NEW, SAMPLES, World, answer, fragment

UPDATES, SIZE = 3, 2
TOLERANCE = 1e-4
"""A hundredth of one step: AdamW makes rounding visible where a gradient is nearly zero, and a prefix is computed in
one piece where the other engine drew its tokens one by one."""

SETTINGS = TrainSettings(learning_rate=1e-2, warmup_updates=1)


def reward(_source: PromptRef, completion: list[int]) -> Reward:
    return Reward(float(completion[0] % 3), "ok")


class Sampler:
    """An engine that always holds the policy as it stands."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._engine, self._loads = folder, TorchEngine(), 0

    def load(self, policy: TrainedPolicy) -> None:
        self._loads += 1
        folder = self._folder / str(self._loads)
        policy.writer.save_hub(folder)
        self._engine.load(folder, 1)

    def sample(self, **lease: Any) -> tuple[Sample, ...]:
        request = SampleRequest(request_id="0", version=1, max_new_tokens=MAX_NEW, temperature=1.0, **lease)
        done: list[Any] = []
        self._engine.generate([request], done.append)
        samples: tuple[Sample, ...] = done[0].samples
        return samples


def synchronous(folder: Path, seeds: list[tuple[bytes, int]], sampler: Sampler) -> TrainedPolicy:
    """Sample a batch from the policy as it stands, train on it, and again."""
    policy = TrainedPolicy(folder, SETTINGS)
    for update in range(UPDATES):
        sampler.load(policy)
        groups = []
        for prompt, seed in seeds[update * SIZE : (update + 1) * SIZE]:
            drawn = sampler.sample(prompt=prompt, seed=seed, samples=SAMPLES)
            samples = tuple(
                TrainingSample(
                    tokens=one.tokens,
                    logprobs=one.logprobs,
                    reward=reward(PromptRef("train", 0), unpack_tokens(one.tokens).tolist()).score,
                )
                for one in drawn
            )
            groups.append(TrainingGroup(claim_id="0" * 64, prompt=prompt, policy_update=update, samples=samples))
        policy.train_step(groups)
    return policy


def lose(world: World, key: NodeKey, lease: Lease, samples: tuple[Sample, ...]) -> Lease:
    """The node tells of its first token and gives up; another takes the group over."""
    first = FragmentPart(sample=0, start=0, tokens=samples[0].tokens[:4], logprobs=samples[0].logprobs[:4], finish="")
    world.tell(key, fragment(key, lease, {}, parts=(first,)))
    world.give_back(key, lease)
    (heir,) = world.offer(key, version=lease.version, continues=True).leases
    assert heir.prefixes
    return heir


def swarm(world: World, folder: Path, seeds: list[tuple[bytes, int]], sampler: Sampler) -> TrainedPolicy:
    """Run the updates by leases, claims, batches and reports; record which prompts and seeds were leased."""
    policy, key = TrainedPolicy(folder, SETTINGS), world.join(1)
    bounds = PolicyBounds(policy.model.config.vocab_size, frozenset({policy.model.config.eos_token_id}), MAX_NEW)
    world.judge = replace(world.judge, bounds=bounds, reward=reward)
    for update in range(UPDATES):
        world.publish(update + 1, update)
        sampler.load(policy)
        for lease in world.offer(key, version=update + 1, groups=64).leases:
            seeds.append((lease.prompt, lease.seed))
            drawn = sampler.sample(prompt=lease.prompt, seed=lease.seed, samples=SAMPLES)
            if update == 1 and len(drawn[0].tokens) > 4:
                lease = lose(world, key, lease, drawn)
                drawn = sampler.sample(prompt=lease.prompt, seed=lease.seed, samples=SAMPLES, prefixes=lease.prefixes)
            assert world.submit(key, answer(key, lease, samples=drawn)).outcome == "accepted"
        assert world.offer(key, version=update + 1).reason == "ahead", "nothing is sampled while the learner trains"
        batch = world.batch(update + 1)
        assert batch is not None
        policy.train_step(batch.groups)
        world.report(update + 1)
    return policy


def test_a_bound_of_zero_gives_the_weights_of_the_synchronous_loop(policy_folder: Path, tmp_path: Path) -> None:
    """Even where a group is lost half-way and gone on with."""
    world = World(tmp_path, staleness=0, size=SIZE, over_issue=1)
    seeds: list[tuple[bytes, int]] = []
    ours = swarm(world, policy_folder, seeds, Sampler(tmp_path / "swarm"))
    plain = synchronous(policy_folder, seeds, Sampler(tmp_path / "plain"))
    start = TrainedPolicy(policy_folder, SETTINGS).model.state_dict()
    moved = 0.0
    for name, weights in plain.model.state_dict().items():
        torch.testing.assert_close(ours.model.state_dict()[name], weights, rtol=0, atol=TOLERANCE)
        moved = max(moved, float((weights - start[name]).abs().max()))
    assert moved > 1e-3, "the rewards must teach something"
    assert world.rows(tables.parts), "something was handed on"
    world.database.close()
