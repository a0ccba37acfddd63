"""Packed samples say what they would say apart: on every family, at every cut, with their gradients."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from coordinator.learner.settings import TrainSettings
from coordinator.model.batch import Tensors, collate
from coordinator.model.forward import completion_logprobs, packs, prepare, sums_in_order
from coordinator.model.head import CHUNK_BYTES, body_of, chunk_rows, selected_logprobs
from coordinator.model.packing import imitating_card
from protocol.errors import ConfigInvalid
from tests.architectures import zoo
from tests.coordinator.learner.groups import UNEQUAL, group
from tests.live_bytes import live_bytes

PLAIN = TrainSettings(learning_rate=0.0)
HEAVY = (group(0, [19, 20, 31], [([21] * 30 + [2], [-1.0] * 31, 0.0)] * 15 + [([21] * 2000, [-1.0] * 2000, 1.0)]),)
"""A group of which one sample did not come to an end."""
SINGLE = (group(0, [19, 31], [([2], [-1.0], 1.0), ([3], [-1.0], 0.0)]),)
"""Completions of one token: none of them is ever fed."""


def qwen3(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def apart(model: Any, data: Tensors, row: int) -> torch.Tensor:
    """Return the log-probabilities of a completion from an unpadded forward pass: [T]."""
    prompt, length = data.prompts[data.owners[row]], int(data.lengths[row])
    tokens = torch.cat([prompt, data.tokens[row, :length]])[None]
    logits = model(input_ids=tokens, use_cache=False).logits[0, len(prompt) - 1 : -1]
    chosen: torch.Tensor = logits.log_softmax(-1).gather(1, data.tokens[row, :length, None])[:, 0]
    return chosen


@pytest.mark.parametrize("groups", [UNEQUAL, UNEQUAL[:1], SINGLE], ids=["unequal", "one group", "single tokens"])
def test_packing_changes_no_logprob_and_no_gradient(policy_folder: Path, groups: Any) -> None:
    model, data = qwen3(policy_folder), collate(groups)
    prepare(model)
    everything = torch.arange(len(data.mask))
    packed, _ = completion_logprobs(model, data, everything, PLAIN.products)
    weights = torch.randn(packed.shape, generator=torch.Generator().manual_seed(0)) * data.mask
    (packed * weights).sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    for row in everything.tolist():
        expected = apart(model, data, row)
        assert (packed[row, : len(expected)] - expected).abs().max() < 1e-5
        assert torch.all(packed[row, len(expected) :] == 0)
        (expected * weights[row, : len(expected)]).sum().backward()  # type: ignore[no-untyped-call]  # as above
    for name, weight in model.named_parameters():
        assert torch.allclose(gradients[name], weight.grad, atol=1e-5), name


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(tie_word_embeddings=False),
        Qwen2Config(tie_word_embeddings=True),
    ],
    ids=["llama", "qwen2"],
)
def test_families_with_shared_key_heads(config: Any) -> None:
    for name, value in SIZES.items():
        setattr(config, name, value)
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]  # transformers annotates half
    prepare(model)
    data = collate(UNEQUAL)
    packed, _ = completion_logprobs(model, data, torch.tensor([0, 3, 5]), PLAIN.products)
    for place, row in enumerate((0, 3, 5)):
        expected = apart(model, data, row)
        assert (packed[place, : len(expected)] - expected).abs().max() < 1e-5


class OnCard(torch.Tensor):
    """Numbers of samples as FSDP passes them to a method on a card: they index no tensor of the host."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.cpu:
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        with torch._C.DisableTorchFunctionSubclass():
            return args[0].as_subclass(torch.Tensor)


def test_samples_may_be_chosen_by_numbers_on_a_card(policy_folder: Path) -> None:
    model, data, chosen = qwen3(policy_folder), collate(UNEQUAL), torch.tensor([0, 3, 5])
    prepare(model)
    expected, _ = completion_logprobs(model, data, chosen, PLAIN.products)
    moved, _ = completion_logprobs(model, data, chosen.as_subclass(OnCard), PLAIN.products)
    assert torch.equal(moved, expected)


def test_attention_as_on_a_card_changes_no_logprob_and_no_gradient(policy_folder: Path) -> None:
    model, data, found = qwen3(policy_folder), collate(UNEQUAL), []
    prepare(model)
    for way in (nullcontext(), imitating_card()):
        with way:
            logprobs, _ = completion_logprobs(model, data, torch.arange(len(data.mask)), PLAIN.products)
            model.zero_grad()
            logprobs.sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        found.append([logprobs, *(weight.grad.clone() for weight in model.parameters())])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("name", "in_order"),
    [("Qwen3", True), ("Gemma 3", True), ("Mixtral", False), ("Qwen3.5", False), ("Granite 4 (hybrid)", False)],
)
def test_a_card_has_no_fixed_order_for_experts_and_carried_states(name: str, in_order: bool) -> None:
    """torch would refuse to count the tokens of experts, and to add up what a layer carries from place to place."""
    assert sums_in_order(zoo.make_config(name)) is in_order


@pytest.mark.parametrize("padded", [0, 8, 40])
def test_samples_that_are_cut_apart_by_their_lengths_say_the_same(
    policy_folder: Path, monkeypatch: Any, padded: int
) -> None:
    monkeypatch.setattr("coordinator.model.packing.PADDED_MAX", padded)
    lengths = [1, 9, 2, 30, 3, 17, 4, 1]
    cut = [group(0, [19, 20, 31], [(list(range(20, 20 + length)), [-1.0] * length, 1.0) for length in lengths[:5]])]
    cut += [group(1, [19], [(list(range(30, 30 + length)), [-1.0] * length, 1.0) for length in lengths[5:]])]
    test_packing_changes_no_logprob_and_no_gradient(policy_folder, cut)


def test_one_sample_without_an_end_costs_the_others_nothing(policy_folder: Path, monkeypatch: Any) -> None:
    """Attention in one rectangle would make sixteen long samples of it."""
    model, data, seen = qwen3(policy_folder), collate(HEAVY), []
    prepare(model)

    def looked_at(query: torch.Tensor, *others: Any, **more: Any) -> torch.Tensor:
        seen.append(query.shape[0] * query.shape[2])
        return scaled_dot_product_attention(query, *others, **more)

    monkeypatch.setattr("coordinator.model.packing.scaled_dot_product_attention", looked_at)
    with torch.no_grad():
        completion_logprobs(model, data, torch.arange(len(data.mask)), PLAIN.products)
    layers = model.config.num_hidden_layers
    assert sum(seen) / layers < 1.1 * int(data.lengths.sum())


SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "head_dim": 8,
    "eos_token_id": 2,
}


STATEFUL = ("Qwen3-Next", "Qwen3.5", "LFM2", "Falcon-H1", "Granite 4 (hybrid)")
SLIDING = ("Mistral (window)", "Qwen2 (window)", "Gemma 2", "Gemma 3", "OLMo 3", "GPT-OSS", "Command A")
SHAPED = ("Phi-2", "Granite", "Command R", "StableLM")
LONG = tuple(
    group(
        number,
        range(first, first + width),
        [(list(range(9, 9 + length)), [-1.0] * length, 1.0) for length in lengths],
    )
    for number, (first, width, lengths) in enumerate([(40, 9, [5, 1, 12]), (80, 3, [8, 2, 7]), (120, 14, [3, 9, 4])])
)
"""Prompts and completions that are longer than a window of four tokens, in no order of their lengths."""


@pytest.mark.parametrize("name", [*STATEFUL, *SLIDING, *SHAPED])
def test_no_sample_changes_another_whatever_the_architecture(name: str, tmp_path: Path) -> None:
    """Layers that carry a state from place to place mix samples that are packed: 4 nats in these policies."""
    model: Any = AutoModelForCausalLM.from_pretrained(zoo.make(name, tmp_path), dtype=torch.float32)
    exact: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    prepare(model)
    assert packs(model) is (name not in (*STATEFUL, "StableLM"))
    data = collate(LONG)
    everything = torch.arange(len(data.mask))
    packed, _ = completion_logprobs(model, data, everything, PLAIN.products)
    weights = torch.randn(packed.shape, generator=torch.Generator().manual_seed(0)) * data.mask
    (packed * weights).sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    for row in everything.tolist():
        expected = apart(exact, data, row)
        assert (packed[row, : len(expected)] - expected).abs().max() < 1e-4
        assert torch.all(packed[row, len(expected) :] == 0)
        (expected * weights[row, : len(expected)]).sum().backward()  # type: ignore[no-untyped-call]  # as above
    theirs = dict(exact.named_parameters())
    for key, weight in model.named_parameters():
        found, wanted = (torch.zeros(()) if one.grad is None else one.grad for one in (weight, theirs[key]))
        assert (found - wanted).abs().max() <= 1e-3 * wanted.abs().max() + 1e-5, key


@pytest.mark.parametrize("name", ["OPT", "Phi-3.5-MoE", "Qwen3-Next"])
def test_layers_that_are_computed_twice_drop_nothing_and_add_no_noise(name: str, tmp_path: Path) -> None:
    """Dropout and routers' noise are for training from scratch: no node samples with them."""
    model: Any = AutoModelForCausalLM.from_pretrained(zoo.make(name, tmp_path), dtype=torch.float32)
    exact: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    prepare(model, gradient_checkpointing=True)
    data, seen = collate(LONG), []
    layer = body_of(model).layers[0]
    inner = next(module for module in layer.modules() if isinstance(module, torch.nn.Linear))
    inner.register_forward_hook(lambda *_: seen.append(1))
    found, _ = completion_logprobs(model, data, torch.arange(len(data.mask)), PLAIN.products)
    computed = len(seen)
    found.sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    assert len(seen) == 2 * computed
    for row in range(len(data.mask)):
        expected = apart(exact, data, row)
        assert (found[row, : len(expected)] - expected).abs().max() < 1e-4


def test_a_model_whose_logits_are_not_a_plain_product_is_refused(tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(zoo.make("Llama 3", tmp_path), dtype=torch.float32)
    model.register_forward_hook(lambda _model, _inputs, output: replace(output, logits=0.5 * output.logits))
    with pytest.raises(ConfigInvalid, match="cannot train a llama"):
        prepare(model)


@pytest.mark.parametrize(
    ("vocabulary", "width", "rows"),
    [(49_152, 576, 341), (151_936, 1024, 128), (151_936, 4096, 512), (320, 128, 52_428)],
    ids=["SmolLM2-135M", "Qwen3-0.6B", "Qwen3-8B", "embedded"],
)
def test_chunks_of_a_head_that_learns_grow_with_its_gradient(vocabulary: int, width: int, rows: int) -> None:
    """64 MiB at least, as a frozen head has always; one chunk is never more than an eighth of what is there anyway."""
    weight = torch.empty(vocabulary, width, device="meta")
    assert chunk_rows(weight, learns=True) == rows
    assert chunk_rows(weight, learns=False) == CHUNK_BYTES // (4 * vocabulary)
    assert 4 * rows * vocabulary <= max(CHUNK_BYTES, weight.nbytes // 8)


def test_the_gradient_of_the_head_holds_one_chunk_of_logits(monkeypatch: Any) -> None:
    vocabulary, chunk = 4096, 4 * 4096 * 64
    monkeypatch.setattr("coordinator.model.head.CHUNK_BYTES", chunk)  # 64 states; 64 MiB would make the test slow
    hidden, weight = torch.randn(256, 4).requires_grad_(), torch.randn(vocabulary, 4).requires_grad_()
    source, tokens = torch.arange(256), torch.arange(256)
    found, _ = selected_logprobs(hidden, weight, source, tokens, temperature=1.0, dtype=torch.float32)
    with live_bytes() as count:
        found.sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    assert count.peak <= 1.3 * chunk


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunks", [1, 3])
def test_the_head_in_chunks_is_log_softmax(monkeypatch: Any, temperature: float, chunks: int) -> None:
    rows, vocabulary = 7, 11
    monkeypatch.setattr("coordinator.model.head.CHUNK_BYTES", CHUNK_BYTES if chunks == 1 else 4 * vocabulary * 3)
    random = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(rows, 5, generator=random), torch.randn(vocabulary, 5, generator=random)
    source, tokens = torch.tensor([0, 0, 0, 2, 3, 3, 5, 6, 6]), torch.tensor([1, 1, 4, 0, 10, 2, 3, 9, 9])
    scale = torch.randn(len(source), generator=random)

    def run(chunked: bool) -> tuple[torch.Tensor, ...]:
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if chunked:
            found, entropy = selected_logprobs(h, w, source, tokens, temperature=temperature, dtype=torch.float32)
        else:
            scores = (h @ w.T / temperature).log_softmax(-1)
            found, entropy = scores[source, tokens], -(scores.exp() * scores).sum(-1)
        (found * scale).sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        assert h.grad is not None
        assert w.grad is not None
        return found.detach(), entropy.detach(), h.grad, w.grad

    for ours, expected in zip(run(True), run(False), strict=True):
        assert torch.allclose(ours, expected, atol=1e-5)
