"""The torch scorer against the numpy definition, in any company and any slicing, within its memory."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config

from coordinator.audit import scorer as module
from coordinator.audit.scorer import VersionScorer
from coordinator.rules.replay import Prefill, Scored, score
from protocol.errors import AuditFailed
from protocol.work.sampling import uniforms
from tests.adapted_policy import make_adapted, make_merged
from tests.architectures import zoo
from tests.tiny_policy import make_other_policy

PROMPTS = ([19], [19, 20, 31], [19, 20, 13, 21, 22, 31], list(range(10, 30)))
SMALL = Qwen3Config(
    vocab_size=4096,
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=512,
    head_dim=64,
    eos_token_id=2,
    tie_word_embeddings=True,
)
TEMPERATURES = ((1.0, None), (0.6, None), (1.0, 0.4), (0.6, 0.0))
"""The version's and the lease's own, of each claim."""
LENGTHS = (1, 2, 7, 30)  # one token is never fed; the others are padded to the longest


def prefills() -> list[Prefill]:
    made = []
    for seed, prompt in enumerate(PROMPTS):
        chance = np.random.Generator(np.random.Philox(seed))
        completions = [chance.integers(0, 320, length).astype(np.uint32) for length in LENGTHS]
        made.append(Prefill(np.array(prompt, np.uint32), completions, seed, *TEMPERATURES[seed]))
    made[0].completions[1][:] = 0  # the first token of the vocabulary has nothing below it
    return made


def expected(policy: Path, claim: Prefill, number: int) -> Scored:
    return alone(AutoModelForCausalLM.from_pretrained(policy), claim, number)


def alone(model: Any, claim: Prefill, number: int) -> Scored:
    """A sample as the definition has it, in no company."""
    tokens = claim.completions[number]
    with torch.inference_mode():
        row = torch.tensor([[*claim.prompt.tolist(), *tokens.tolist()]])
        logits = model(row, use_cache=False).logits[0, len(claim.prompt) - 1 : -1].numpy()
    heats = claim.temperature, claim.own_temperature
    return score(logits, uniforms(claim.seed, number, len(tokens)), tokens.tolist(), *heats)


def same(left: Scored, right: Scored) -> bool:
    close = [np.allclose(getattr(left, name), getattr(right, name), atol=1e-5) for name in ("logprobs", "margins")]
    return all(close) and bool((left.dictated == right.dictated).all())


def test_scores_are_those_of_the_definition_at_each_claims_own_temperature(policy: Path) -> None:
    claims = prefills()
    for claim, found in zip(claims, VersionScorer(policy).score(claims), strict=True):
        for number, scored in enumerate(found):
            assert same(scored, expected(policy, claim, number))


@pytest.mark.parametrize(("body", "head"), [(1, 1), (64, 3 * 320), (10**6, 10**9)])
def test_slices_and_batches_change_nothing(policy: Path, monkeypatch: pytest.MonkeyPatch, body: int, head: int) -> None:
    whole = VersionScorer(policy).score(prefills())
    monkeypatch.setattr(module, "BODY_TOKENS_MAX", body)
    monkeypatch.setattr(module, "HEAD_LOGITS_MAX", head)
    parts = VersionScorer(policy).score(prefills())
    assert all(same(a, b) for left, right in zip(whole, parts, strict=True) for a, b in zip(left, right, strict=True))


def test_no_tensor_holds_samples_times_tokens_times_vocabulary(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest input of the head is a slice, however many tokens there are."""
    monkeypatch.setattr(module, "HEAD_LOGITS_MAX", 4 * 320)
    scorer, seen = VersionScorer(policy), list[int]()
    scorer._head.output.register_forward_hook(lambda _module, _inputs, output: seen.append(output.numel()))
    scorer.score(prefills())
    assert 0 < max(seen) <= 4 * 320


def test_an_adapter_beside_its_base_is_scored_as_the_merged_policy(policy: Path, tmp_path: Path) -> None:
    adapted = make_adapted(policy, tmp_path / "adapted", seed=1)
    merged = make_merged(adapted, tmp_path / "merged")
    found, wanted, base = (VersionScorer(folder).score(prefills()) for folder in (adapted, merged, policy))
    assert all(same(*pair) for claim in zip(found, wanted, strict=True) for pair in zip(*claim, strict=True))
    assert not all(same(*pair) for claim in zip(found, base, strict=True) for pair in zip(*claim, strict=True))


def test_nothing_to_score_is_nothing(policy: Path) -> None:
    assert VersionScorer(policy).score([]) == []


def test_tokens_beyond_a_versions_vocabulary_are_a_named_error(policy: Path) -> None:
    claim = Prefill(np.array([19], np.uint32), [np.array([400], np.uint32)], 1, 1.0)
    with pytest.raises(AuditFailed, match="vocabulary"):
        VersionScorer(policy).score([claim])


@pytest.mark.parametrize("damage", ["missing", "truncated", "nan", "a tensor too few", "pickled", "config"])
def test_a_damaged_policy_is_a_named_error(policy: Path, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(policy, folder)
    weights = folder / "model.safetensors"
    if damage == "missing":
        weights.unlink()
    elif damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif damage == "a tensor too few":
        tensors = load_file(weights)
        del tensors["model.norm.weight"]
        save_file(tensors, weights, {"format": "pt"})
    elif damage == "pickled":
        torch.save(load_file(weights), folder / "pytorch_model.bin")
        weights.unlink()
    elif damage == "config":
        (folder / "config.json").write_text('{"model_type": "qwen3", "num_attention_heads": "many"}')
    else:
        save_file({name: tensor * torch.nan for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
    with pytest.raises(AuditFailed):
        VersionScorer(folder).score(prefills())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attn_implementation": "kernels-community/flash-attn2"}, "names code"),
        ({"num_hidden_layers": 1000, "layer_types": None}, "has 1000 layers"),
        ({"vocab_size": 2**20}, "parameters, but the tensors have"),
    ],
)
def test_a_configuration_that_promises_more_than_it_has_is_refused_before_it_costs_memory(
    policy: Path, tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    """The folder of a case is untrusted."""
    folder = shutil.copytree(policy, tmp_path / "promising")
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(AuditFailed, match=said):
        VersionScorer(folder)


@pytest.mark.parametrize(
    ("architecture", "packed"),
    [("Llama 3", True), ("Qwen3", True), ("Gemma 2", True), ("GPT-OSS", True), ("Qwen3-Next", False)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_or_in_rows_a_replay_says_what_the_definition_says(
    tmp_path: Path, architecture: str, packed: bool, dtype: torch.dtype
) -> None:
    """Strict as ever: within 1e-4 nats of each sample alone in float32, also where matrices stay in 16 bits."""
    folder = zoo.make(architecture, tmp_path / "policy", dtype=dtype)
    scorer = VersionScorer(folder)
    assert scorer.packs == packed
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    for claim, found in zip(prefills(), scorer.score(prefills()), strict=True):
        for number, scored in enumerate(found):
            wanted = alone(model, claim, number)
            assert np.abs(scored.logprobs - wanted.logprobs).max() <= 1e-4
            agree = scored.dictated == wanted.dictated
            assert np.allclose(scored.margins[agree], wanted.margins[agree], atol=1e-4)
            assert (scored.dictated == wanted.dictated).mean() > 0.98


def test_matrices_stay_in_the_type_in_which_they_were_published(tmp_path: Path) -> None:
    """Two bytes for each number of a model in bfloat16, and four where a tensor is wider."""
    narrow, wide = (zoo.make("Qwen3", tmp_path / str(dtype), dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    for folder, size in ((narrow, 2), (wide, 4)):
        matrices = [one for one in VersionScorer(folder)._model.parameters() if one.ndim > 1]
        assert {one.element_size() for one in matrices} == {size}


def test_every_module_moves(policy: Path) -> None:
    moves = list[int]()
    scorer = VersionScorer(policy, moved=lambda: moves.append(1))
    moves.clear()
    scorer.score(prefills())
    assert len(moves) > 20


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32], ids=str)
def test_weights_that_are_laid_out_in_16_bits_are_those_of_float32_rounded(stored: torch.dtype, tmp_path: Path) -> None:
    folder = make_other_policy(tmp_path / "policy", SMALL, dtype=stored)
    found = module.load_policy(folder, torch.bfloat16, "cpu")
    wanted = module.load_policy(folder, torch.float32, "cpu").to(torch.bfloat16)
    ours, theirs = (dict(model.named_parameters()) | dict(model.named_buffers()) for model in (found, wanted))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor) for name, tensor in theirs.items())
