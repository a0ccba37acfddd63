"""Versions that are adapters beside a base, in vLLM: built from one, swapped, and nothing of one left in the next."""

from pathlib import Path

from swarm_node.engine.messages import SampleRequest
from tests.adapted_policy import make_adapted, make_merged
from tests.swarm_node.engine.asking import PROMPTS, asked
from tests.vllm.child import Child
from tests.vllm.test_engine import assert_same, of_torch


def questions(version: int) -> list[SampleRequest]:
    return [asked(prompt, seed, version=version) for seed, prompt in enumerate(PROMPTS)]


def test_adapters_are_swapped_in_place_and_sample_as_the_merged_policies(
    child: Child, policy: Path, grouped: Path, tmp_path: Path
) -> None:
    folders = [make_adapted(policy, tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    merged = [make_merged(folder, tmp_path / f"merged-{folder.name}") for folder in folders]
    child.load(grouped)  # so that the next is built, from an adapter
    for version, (folder, like) in enumerate(
        zip([*folders, policy, folders[0]], [*merged, policy, merged[0]], strict=True)
    ):
        assert child.load(folder, version).rebuilt == (version == 0)
        requests = questions(version)
        assert_same(child.sample(*requests), of_torch(like, *requests))
