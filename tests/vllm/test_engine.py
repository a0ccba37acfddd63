"""vLLM behind the engine's protocol: the same tokens as the torch engine, swaps that take, and every way to fail."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol.policy.canary import FILE_NAME
from protocol.work.lease import Prefix
from protocol.work.rollout import Sample, pack_tokens, unpack_tokens
from swarm_node.engine.messages import (
    Cancelled,
    CancelRequests,
    CommandFailed,
    Ended,
    Generate,
    GroupDone,
    GroupFailed,
    GroupGrown,
    Loaded,
    LoadVersion,
    Measure,
    SampleRequest,
    SamplingStats,
)
from swarm_node.engine.torch.engine import TorchEngine
from tests.swarm_node.engine.asking import PROMPTS, asked, sample
from tests.swarm_node.engine.test_continuing import prefixes
from tests.vllm.child import Child

LONG_PROMPT = [10 + number % 300 for number in range(300)]
"""More than two of the blocks in which vLLM keeps what prompts had in common."""

BLOCK = 128
"""The tokens of such a block on a CPU."""

NATS = 2e-5
"""The distance between two engines in float32."""


def changed(policy: Path, folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """A copy of a policy with other weights, and the canary that it had."""
    shutil.copytree(policy, folder)
    for part in folder.glob("*.safetensors"):
        weights = {name: change(tensor) for name, tensor in load_file(part).items()}
        save_file(weights, part, metadata={"format": "pt"})
    return folder


def of_torch(folder: Path, *requests: SampleRequest) -> dict[str, tuple[Sample, ...]]:
    engine = TorchEngine(device="cpu", dtype="float32")
    engine.load(folder, requests[0].version)
    return sample(engine, *requests)


def assert_same(found: dict[str, tuple[Sample, ...]], expected: dict[str, tuple[Sample, ...]]) -> None:
    """Token for token; log-probabilities as far as float32 goes."""
    assert found.keys() == expected.keys()
    for name, group in expected.items():
        for one, wanted in zip(found[name], group, strict=True):
            assert (one.tokens, one.finish) == (wanted.tokens, wanted.finish)
            logprobs, wanted_logprobs = (np.frombuffer(each.logprobs, "<f4") for each in (one, wanted))
            np.testing.assert_allclose(logprobs, wanted_logprobs, atol=NATS)


@pytest.mark.parametrize("kind", ["policy", "grouped"])
def test_tokens_and_logprobs_are_those_of_the_torch_engine(
    child: Child, kind: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(kind)
    child.load(folder)
    requests = [
        asked(prompt, seed, max_new_tokens=8 + 5 * seed, temperature=temperature)
        for seed, (prompt, temperature) in enumerate(zip(PROMPTS, (1.0, 0.6, 1.0, 1.4), strict=True))
    ]
    assert_same(child.sample(*requests), of_torch(folder, *requests))


def test_leases_of_a_batch_are_drawn_each_at_its_own_temperature(child: Child, policy: Path) -> None:
    """More samples than fit at once: rows of one temperature take the places of rows of another."""
    child.load(policy)
    requests = [
        asked(prompt, seed, samples=64, max_new_tokens=4 + 3 * seed, temperature=0.8, own_temperature=own)
        for seed, (prompt, own) in enumerate(zip((*PROMPTS, [40]), (None, 0.0, 0.3, 2.0, 0.0), strict=True))
    ]
    found = child.sample(*requests)
    assert_same(found, of_torch(policy, *requests))
    assert [len({one.tokens for one in found[f"seed {seed}"]}) == 1 for seed in range(5)] == [
        False, True, False, False, True
    ]  # fmt: skip


def test_seeds_of_64_bits_draw_what_they_dictate(child: Child, policy: Path) -> None:
    child.load(policy)
    requests = [asked(PROMPTS[1], seed) for seed in (0, 2**63, 2**64 - 1)]
    assert_same(child.sample(*requests), of_torch(policy, *requests))


def test_more_samples_than_a_batch_holds_are_all_drawn(child: Child, policy: Path) -> None:
    child.load(policy)
    requests = [asked(PROMPTS[2], seed, samples=64, max_new_tokens=3) for seed in range(6)]
    assert_same(child.sample(*requests), of_torch(policy, *requests))


def test_a_short_request_ends_before_a_long_one_that_came_first(child: Child, policy: Path) -> None:
    child.load(policy)
    child.tell(Generate(requests=(asked([19], 1, max_new_tokens=300),)))
    child.tell(Generate(requests=(asked([19], 2, max_new_tokens=2),)))
    assert [group.request_id for group in child.next_ends(2)] == ["seed 2", "seed 1"]


def test_a_swap_stays_in_place_and_samples_as_torch_does(child: Child, policy: Path, other: Path) -> None:
    child.load(policy)
    wanted = asked(LONG_PROMPT)
    before = child.sample(wanted)
    assert_same(before, of_torch(policy, wanted))
    swapped = child.load(other)
    assert (swapped.rebuilt, swapped.numerics, swapped.continues) == (False, "vllm/fp32/cpu", True)
    after = child.sample(wanted)  # a prompt whose keys and values vLLM has kept
    assert_same(after, of_torch(other, wanted))
    assert after != before


def test_another_configuration_is_built_anew(child: Child, policy: Path, grouped: Path) -> None:
    child.load(policy)
    assert child.load(grouped).rebuilt


def test_every_end_token_of_the_policy_ends_a_completion(child: Child, policy: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(policy, tmp_path / "policy")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [10**9, *range(320)]}))
    child.load(policy)
    assert not child.load(folder).rebuilt
    (group,) = child.sample(asked(PROMPTS[1])).values()
    assert {(len(one.tokens), one.finish) for one in group} == {(4, "stop")}


def test_cancel_reaches_what_runs_and_leaves_the_rest(child: Child, policy: Path) -> None:
    child.load(policy)
    child.tell(Generate(requests=(asked([19], 1, max_new_tokens=500), asked([19], 2, max_new_tokens=30))))
    child.tell(CancelRequests(request_ids=("seed 1", "unknown")))
    first, second = child.next_ends(2)
    assert isinstance(first, Cancelled)
    assert isinstance(second, GroupDone)
    assert [first.request_id, second.request_id] == ["seed 1", "seed 2"]
    assert_same({"seed 2": second.samples}, of_torch(policy, asked([19], 2, max_new_tokens=30)))


def test_weights_that_do_not_give_the_canary_are_refused_and_nothing_is_sampled_from_them(
    child: Child, policy: Path, tmp_path: Path
) -> None:
    child.load(policy)
    failed = child.try_load(changed(policy, tmp_path / "damaged", lambda tensor: tensor * 0.9), version=2)
    assert isinstance(failed, CommandFailed)
    assert "does not give its canary" in failed.message
    assert message_of(child.ends(asked(PROMPTS[0], version=2))) == "No policy is loaded."
    assert child.load(policy, 3).rebuilt
    assert child.sample(asked(PROMPTS[0], version=3))


@pytest.mark.parametrize("garbage", ["no folder", "no weights", "half a file"])
def test_a_folder_that_is_no_policy_is_refused_by_name(
    child: Child, policy: Path, tmp_path: Path, garbage: str
) -> None:
    folder = tmp_path / "policy"
    if garbage != "no folder":
        shutil.copytree(policy, folder)
        weights = folder / "model.safetensors"
        data = weights.read_bytes()
        weights.unlink()
        if garbage == "half a file":
            weights.write_bytes(data[: len(data) // 2])
    failed = child.try_load(folder)
    assert isinstance(failed, CommandFailed)
    assert failed.code == "engine_failed"
    assert "cannot be loaded" in failed.message


def test_probabilities_that_are_no_numbers_fail_the_group(child: Child, policy: Path, tmp_path: Path) -> None:
    folder = changed(policy, tmp_path / "policy", lambda tensor: tensor * math.nan)
    (folder / FILE_NAME).unlink()
    child.load(folder)
    assert "NaN" in message_of(child.ends(asked(PROMPTS[0])))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (asked([320]), "vocabulary"),
        (asked([5], max_new_tokens=512), "positions"),
        (asked([5], version=2), "version 2, while version 1"),
        (asked([5], prefixes=(Prefix(tokens=b"", finish=""),) * 4), "prefixes are not one for each sample"),
        (asked([5], prefixes=(Prefix(tokens=pack_tokens([320]), finish=""),) * 5), "beyond the vocabulary"),
    ],
)
def test_what_the_policy_cannot_do_is_refused(child: Child, policy: Path, wrong: SampleRequest, message: str) -> None:
    child.load(policy)
    assert message in message_of(child.ends(wrong))


@pytest.mark.parametrize(
    "cut", [lambda n, count: count - 1, lambda n, count: 3 * n], ids=["all but one token", "some whole, some not begun"]
)
def test_a_group_that_another_node_began_continues_with_the_tokens_of_one_run(
    child: Child, policy: Path, cut: Callable[[int, int], int]
) -> None:
    assert child.load(policy).continues
    wanted = [asked(prompt, seed) for seed, prompt in enumerate(PROMPTS)]
    alone = of_torch(policy, *wanted)
    begun = {name: prefixes(group, cut) for name, group in alone.items()}
    heirs = [one.model_copy(update={"prefixes": begun[one.request_id]}) for one in wanted]
    for name, group in child.sample(*heirs).items():
        for prefix, rest, whole in zip(begun[name], group, alone[name], strict=True):
            assert (prefix.tokens + rest.tokens, rest.finish) == (whole.tokens, whole.finish)
            kept = len(prefix.tokens) // 4
            logprobs, expected = (np.frombuffer(each.logprobs, "<f4") for each in (rest, whole))
            np.testing.assert_allclose(logprobs, expected[kept:], atol=NATS)


@pytest.mark.parametrize("turn_tokens_max", [1, 4, 12])
def test_turns_are_the_parts_of_an_undisturbed_sample(child: Child, policy: Path, turn_tokens_max: int) -> None:
    """The last turn of a sample of 12 tokens has the tokens that are left."""
    child.load(policy)
    whole = of_torch(policy, asked(PROMPTS[2], 3))["seed 3"]
    begun = prefixes(whole, lambda _number, count: min(turn_tokens_max * ((count - 1) // turn_tokens_max), 8))
    turn = asked(PROMPTS[2], 3, prefixes=begun, turn_tokens_max=turn_tokens_max)
    for prefix, one, alone in zip(begun, child.sample(turn)["seed 3"], whole, strict=True):
        made = prefix.tokens + one.tokens
        assert made == alone.tokens[: len(prefix.tokens) + 4 * turn_tokens_max]
        assert one.finish == (alone.finish if made == alone.tokens else "length")


def test_a_turn_after_an_observation_has_the_tokens_that_torch_draws(child: Child, policy: Path) -> None:
    """A long context, of which vLLM has most in its prefix cache when the second turn comes."""
    child.load(policy)
    first = asked(LONG_PROMPT, 4, turn_tokens_max=5, max_new_tokens=40)
    drawn = child.sample(first)["seed 4"]
    assert_same({"seed 4": drawn}, of_torch(policy, first))
    begun = tuple(Prefix(tokens=one.tokens + pack_tokens([21, 22, 23]), finish="") for one in drawn)
    second = first.model_copy(update={"prefixes": begun})
    assert_same(child.sample(second), of_torch(policy, second))


def computed_by(child: Child, request: SampleRequest) -> tuple[int, tuple[Sample, ...]]:
    """The tokens that were computed before the first draw of a group, and the group."""
    child.tell(Measure())
    child.answer()
    (drawn,) = child.sample(request).values()
    child.tell(Measure())
    measured = child.answer()
    assert isinstance(measured, SamplingStats)
    return measured.prompt_tokens, drawn


def test_a_turn_computes_only_the_blocks_that_are_not_in_the_prefix_cache(
    child: Child, policy: Path, other: Path
) -> None:
    """Blocks that the policy drew or read before are cached as soon as they are full; another version has nothing."""
    child.load(policy)
    turn = asked(LONG_PROMPT, 11, turn_tokens_max=5, max_new_tokens=180)
    known, kept = [len(LONG_PROMPT)] * 5, [0] * 5
    for observed in (3, 100, 3, 0):
        computed, drawn = computed_by(child, turn)
        if turn.prefixes:
            assert computed == sum(length - cached for length, cached in zip(known, kept, strict=True))
            assert computed < sum(known) / 2
        read = pack_tokens([21] * observed)
        begun = [prefix.tokens for prefix in turn.prefixes] or [b""] * 5
        begun = [before + one.tokens + read for before, one in zip(begun, drawn, strict=True)]
        ends = [length + len(one.tokens) // 4 for length, one in zip(known, drawn, strict=True)]
        kept = [(end - 1) // BLOCK * BLOCK for end in ends]  # the last token that was drawn was not fed
        known = [len(LONG_PROMPT) + len(tokens) // 4 for tokens in begun]
        turn = turn.model_copy(update={"prefixes": tuple(Prefix(tokens=tokens, finish="") for tokens in begun)})
    child.load(other, 2)
    computed, _ = computed_by(child, turn.model_copy(update={"version": 2}))
    assert computed == sum(known) - 4 * (len(LONG_PROMPT) // BLOCK * BLOCK)  # the samples of a group share their prompt


def test_what_was_sampled_is_counted_once(child: Child, policy: Path) -> None:
    child.load(policy)
    child.tell(Measure())
    child.answer()
    drawn = child.sample(*(asked(prompt, seed) for seed, prompt in enumerate(PROMPTS)))
    child.tell(Measure())
    measured = child.answer()
    assert isinstance(measured, SamplingStats)
    assert measured.prompt_tokens == sum(map(len, PROMPTS))
    assert measured.first_tokens == 5 * len(PROMPTS)
    tokens = sum(len(unpack_tokens(one.tokens)) for group in drawn.values() for one in group)
    assert measured.first_tokens + measured.later_tokens == tokens
    assert measured.prefill_s > 0
    assert measured.decode_s > 0


def test_a_group_that_is_read_reports_each_token_once_and_no_other_does(child: Child, policy: Path) -> None:
    child.load(policy)
    read = asked(PROMPTS[0], seed=7, is_read=True, report_every_s=1e-4)
    child.tell(Generate(requests=(read, asked(PROMPTS[1], seed=8, report_every_s=1e-4))))
    grown: dict[int, bytes] = {}
    done: dict[str, tuple[Sample, ...]] = {}
    while len(done) < 2:
        answer = child.answer()
        if isinstance(answer, GroupDone):
            done[answer.request_id] = answer.samples
        elif isinstance(answer, GroupGrown):
            assert answer.request_id == read.request_id
            for part in answer.parts:
                assert part.start == len(grown.get(part.sample, b"")) // 4
                assert len(part.tokens) == len(part.logprobs)
                grown[part.sample] = grown.get(part.sample, b"") + part.tokens
    assert len(grown) == read.samples
    assert all(done[read.request_id][number].tokens.startswith(tokens) for number, tokens in grown.items())
    assert_same(done, of_torch(policy, read, asked(PROMPTS[1], seed=8)))


def test_a_load_waits_for_what_runs(child: Child, policy: Path, other: Path) -> None:
    child.load(policy)
    child.tell(Generate(requests=(asked([19], max_new_tokens=40),)), LoadVersion(folder=str(other), version=2))
    first, second = child.answer(), child.answer()
    assert isinstance(first, GroupDone)
    assert isinstance(second, Loaded)
    assert_same({"seed 7": first.samples}, of_torch(policy, asked([19], max_new_tokens=40)))


def message_of(ended: list[Ended]) -> str:
    (failed,) = ended
    assert isinstance(failed, GroupFailed)
    return failed.message
