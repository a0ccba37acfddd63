"""Losses and gradients against loops over single tokens, in float64 and without a model of ours."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from coordinator.learner.embedded import EmbeddedShape, make_policy
from echo_swarm.tinker.calls import AdamParams
from echo_swarm.tinker.forms import FLOAT32, INT64, ForwardBackward, message
from echo_swarm.tinker.lora import ALPHA, LoraShape, SharedBase
from echo_swarm.tinker.losses import LOSSES
from echo_swarm.tinker.training import TinkerModel
from protocol.errors import FieldRefused, MessageTooLarge, NonFiniteNumber, NotFound, OutOfOrder

Tokenwise = Callable[[torch.Tensor, float, float, Mapping[str, float]], torch.Tensor]
"""The loss of one token from log π, log μ, the advantage or weight, and the settings."""


def cross_entropy(now: torch.Tensor, _: float, weight: float, __: Mapping[str, float]) -> torch.Tensor:
    return -weight * now


def importance_sampling(now: torch.Tensor, before: float, advantage: float, _: Mapping[str, float]) -> torch.Tensor:
    return -torch.exp(now - before) * advantage


def ppo(now: torch.Tensor, before: float, advantage: float, settings: Mapping[str, float]) -> torch.Tensor:
    ratio = torch.exp(now - before)
    low, high = settings["clip_low_threshold"], settings["clip_high_threshold"]
    return -torch.minimum(ratio * advantage, torch.clamp(ratio, low, high) * advantage)


def cispo(now: torch.Tensor, before: float, advantage: float, settings: Mapping[str, float]) -> torch.Tensor:
    ratio = math.exp(float(now.detach()) - before)
    factor = min(max(ratio, settings["clip_low_threshold"]), settings["clip_high_threshold"])
    return -factor * advantage * now


def dro(now: torch.Tensor, before: float, advantage: float, settings: Mapping[str, float]) -> torch.Tensor:
    return -(advantage * now - settings["beta"] / 2 * (now - before) ** 2)


REFERENCES: Mapping[str, tuple[Tokenwise, Mapping[str, float]]] = {
    "cross_entropy": (cross_entropy, {}),
    "importance_sampling": (importance_sampling, {}),
    "ppo": (ppo, {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
    "cispo": (cispo, {"clip_low_threshold": 0.5, "clip_high_threshold": 1.05}),
    "dro": (dro, {"beta": 0.3}),
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tinker") / "policy"
    make_policy(folder, seed=1, shape=EmbeddedShape(hidden=16, layers=2, heads=2, intermediate=32))
    return folder


@pytest.fixture(scope="module")
def base(policy: Path) -> SharedBase:
    return SharedBase(AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32))


@pytest.fixture
def model(base: SharedBase) -> TinkerModel:
    """A model whose B is not zero, so that both matrices have a gradient."""
    made = TinkerModel(base, LoraShape(rank=4, seed=3))
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for up in made.matrices.up.values():
            up.copy_(torch.randn(up.shape, generator=random) * 0.02)
    return made


def tensor(values: Any) -> Any:
    array = np.asarray(values)
    is_whole = array.dtype.kind == "i"
    array = array.astype(np.int64 if is_whole else np.float32)
    return message("Tensor", dense=array.tobytes(), dtype=INT64 if is_whole else FLOAT32, shape=array.shape)


def datum(tokens: list[int], **inputs: Any) -> Any:
    chunk = message("Chunk", encoded_text=message("EncodedText", tokens=np.asarray(tokens, np.int32).tobytes()))
    entries = [message("LossInput", key=name, value=tensor(values)) for name, values in inputs.items()]
    return message("Datum", model_input=[chunk], loss_fn_inputs=entries)


def request(loss: str, data: list[Any], settings: Mapping[str, float] = {}, **more: Any) -> ForwardBackward:
    return ForwardBackward("model", 1, loss, settings, more.get("forward_only", False), data)


def batch(loss: str) -> tuple[list[Any], list[dict[str, Any]]]:
    """Return three examples of different lengths as messages and as plain lists; each begins with a prompt."""
    random = np.random.default_rng(7)
    plain, data = [], []
    for length in (5, 9, 3):
        row: dict[str, Any] = {"tokens": random.integers(3, 300, length).tolist()}
        row["target_tokens"] = random.integers(3, 300, length).tolist()
        factors = [0.0, 0.0, *random.normal(size=length - 2).round(3).tolist()]
        if loss == "cross_entropy":
            row["weights"] = factors
        else:
            row["logprobs"] = [0.0, 0.0, *(-5.8 + 0.3 * random.normal(size=length - 2)).tolist()]
            row["advantages"] = factors
        plain.append(row)
        data.append(datum(row["tokens"], **{name: values for name, values in row.items() if name != "tokens"}))
    return data, plain


def reference(policy: Path, model: TinkerModel, loss: str, plain: list[dict[str, Any]]) -> tuple[float, dict[str, Any]]:
    """Return the loss and the gradients of the matrices, with merged weights in float64, token by token."""
    tokenwise, settings = REFERENCES[loss]
    whole: Any = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float64)
    parts = {name: part.detach().double().requires_grad_() for name, part in model.matrices.named().items()}
    weights = {
        f"{name}.weight": whole.get_parameter(f"{name}.weight").detach()
        + parts[f"up.{name}"] @ parts[f"down.{name}"] * (ALPHA / 4)
        for name in model.matrices.down
    }
    total = torch.zeros((), dtype=torch.float64)
    for row in plain:
        logits = torch.func.functional_call(whole, weights, (torch.tensor([row["tokens"]]),)).logits[0]
        logprobs = torch.log_softmax(logits, -1)
        for place, target in enumerate(row["target_tokens"]):
            factor = row["weights" if loss == "cross_entropy" else "advantages"][place]
            if factor:
                before = float(np.float32(row["logprobs"][place])) if "logprobs" in row else 0.0
                total = total + tokenwise(logprobs[place, target], before, float(np.float32(factor)), settings)
    torch.autograd.backward(total)
    return float(total.detach()), {name: part.grad for name, part in parts.items()}


@pytest.mark.parametrize("loss", sorted(REFERENCES))
def test_a_loss_and_its_gradient_are_those_of_a_loop_over_tokens(policy: Path, model: TinkerModel, loss: str) -> None:
    assert set(REFERENCES) == set(LOSSES)
    data, plain = batch(loss)
    logprobs, total = model.forward_backward(request(loss, data, REFERENCES[loss][1]))
    wanted, gradients = reference(policy, model, loss, plain)
    assert total == pytest.approx(wanted, rel=1e-6, abs=1e-6)
    assert [len(row) for row in logprobs] == [5, 9, 3]
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, part in model.matrices.named().items():
        assert part.grad is not None
        assert float((part.grad - gradients[name]).abs().max()) <= 1e-6 * max(1.0, largest), name


def test_gradients_of_several_requests_add_up_and_one_step_is_that_of_adamw(model: TinkerModel) -> None:
    data, _ = batch("cross_entropy")
    for one in data:
        model.forward_backward(request("cross_entropy", [one]))
    before = {name: part.detach().clone().requires_grad_() for name, part in model.matrices.named().items()}
    for name, part in model.matrices.named().items():
        assert part.grad is not None
        before[name].grad = part.grad.clone()
    ours = torch.optim.AdamW(before.values(), lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    norm = float(torch.nn.utils.clip_grad_norm_(before.values(), 0.5))
    ours.step()
    metrics = model.step(AdamParams(learning_rate=0.01, eps=1e-8, weight_decay=0.1, grad_clip_norm=0.5))
    assert metrics["grad_norm:mean"] == pytest.approx(norm, rel=1e-6)
    for name, part in model.matrices.named().items():
        assert torch.allclose(part, before[name], atol=1e-7), name


def test_forward_only_computes_no_gradient_and_the_same_logprobs(model: TinkerModel) -> None:
    data, _ = batch("cross_entropy")
    alone, _ = model.forward_backward(request("cross_entropy", data, forward_only=True))
    with pytest.raises(OutOfOrder, match="no forward_backward"):
        model.step(AdamParams())
    again, _ = model.forward_backward(request("cross_entropy", data))
    assert all(np.array_equal(one, other) for one, other in zip(alone, again, strict=True))


def test_a_new_model_is_its_base_and_two_models_do_not_meet(base: SharedBase) -> None:
    first, second = (TinkerModel(base, LoraShape(rank=2, seed=seed)) for seed in (1, 2))
    data, _ = batch("cross_entropy")
    before, _ = second.forward_backward(request("cross_entropy", data, forward_only=True))
    first.forward_backward(request("cross_entropy", data))
    first.step(AdamParams(learning_rate=0.1))
    after, _ = second.forward_backward(request("cross_entropy", data, forward_only=True))
    trained, _ = first.forward_backward(request("cross_entropy", data, forward_only=True))
    assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))
    assert not any(np.array_equal(one, other) for one, other in zip(before, trained, strict=True))


def test_a_saved_state_continues_as_if_nothing_had_happened(
    base: SharedBase, model: TinkerModel, tmp_path: Path
) -> None:
    data, _ = batch("cross_entropy")

    def train(which: TinkerModel) -> None:
        which.forward_backward(request("cross_entropy", data))
        which.step(AdamParams(learning_rate=0.01))

    train(model)
    model.save(tmp_path / "state")
    again = TinkerModel(base, model.matrices.shape)
    again.load(tmp_path / "state", with_optimizer=True)
    fresh = TinkerModel(base, model.matrices.shape)
    fresh.load(tmp_path / "state", with_optimizer=False)
    for which in (model, again, fresh):
        train(which)
    assert again.steps == model.steps == 2
    assert fresh.steps == 1
    for name, part in model.matrices.named().items():
        assert torch.equal(part, again.matrices.named()[name]), name
    assert any(not torch.equal(part, fresh.matrices.named()[name]) for name, part in model.matrices.named().items())
    with pytest.raises(NotFound, match="no state"):
        again.load(tmp_path / "other", with_optimizer=True)


def test_merged_weights_compute_what_the_adapter_computes(base: SharedBase, model: TinkerModel, tmp_path: Path) -> None:
    tokens = torch.tensor([[5, 6, 7, 8]])
    with base.adapted(model.matrices) as adapted, torch.no_grad():
        wanted = adapted(tokens).logits
    base.write_merged(model.matrices, tmp_path)
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        assert torch.allclose(merged(tokens).logits, wanted, atol=1e-5)
        assert not torch.allclose(base.model(tokens).logits, wanted, atol=1e-3), (
            "the adapter is active only where it is"
        )


BAD: Mapping[str, tuple[ForwardBackward, type[Exception], str]] = {
    "unknown loss": (request("hinge", [datum([5], target_tokens=[6])]), FieldRefused, "no loss 'hinge'"),
    "refused loss": (request("gspo", [datum([5], target_tokens=[6])]), FieldRefused, "gspo is not offered"),
    "no data": (request("cross_entropy", []), FieldRefused, "no data"),
    "empty": (request("cross_entropy", [datum([], target_tokens=[])]), FieldRefused, "model_input is empty"),
    "lengths": (
        request("cross_entropy", [datum([5, 6], target_tokens=[6, 7], weights=[1.0])]),
        FieldRefused,
        r"data\[0\].weights has the shape \[1\]",
    ),
    "missing": (request("ppo", [datum([5], target_tokens=[6], logprobs=[0.0])]), FieldRefused, "no advantages"),
    "unused": (
        request("cross_entropy", [datum([5], target_tokens=[6], advantages=[0.0])]),
        FieldRefused,
        "'advantages', which the loss cross_entropy does not use",
    ),
    "NaN weight": (
        request("cross_entropy", [datum([5], target_tokens=[6], weights=[float("nan")])]),
        NonFiniteNumber,
        r"data\[0\].weights has NaN",
    ),
    "infinite advantage": (
        request("ppo", [datum([5], target_tokens=[6], logprobs=[0.0], advantages=[float("inf")])]),
        NonFiniteNumber,
        "advantages has NaN or infinite",
    ),
    "ratio too large": (
        request("importance_sampling", [datum([5], target_tokens=[6], logprobs=[-1e6], advantages=[1.0])]),
        NonFiniteNumber,
        "The loss is infinite",
    ),
    "token": (request("cross_entropy", [datum([9999], target_tokens=[6])]), FieldRefused, "outside the vocabulary"),
    "target": (request("cross_entropy", [datum([5], target_tokens=[-1])]), FieldRefused, "target_tokens has a token"),
    "floats": (request("cross_entropy", [datum([5], target_tokens=[1.0])]), FieldRefused, "must be int64"),
    "too long": (
        request("cross_entropy", [datum([5] * 513, target_tokens=[6] * 513)]),
        MessageTooLarge,
        "the model takes 512",
    ),
    "setting": (
        request("cross_entropy", [datum([5], target_tokens=[6])], {"beta": 1.0}),
        FieldRefused,
        "'beta', which the loss cross_entropy does not know",
    ),
    "no beta": (
        request("dro", [datum([5], target_tokens=[6], logprobs=[0.0], advantages=[1.0])]),
        FieldRefused,
        "needs loss_fn_config",
    ),
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_bad_data_are_refused_by_name_and_no_step_is_made_without_them(model: TinkerModel, name: str) -> None:
    bad, error, said = BAD[name]
    data, _ = batch("cross_entropy")
    model.forward_backward(request("cross_entropy", data))
    before = {key: part.detach().clone() for key, part in model.matrices.named().items()}
    with pytest.raises(error, match=said):
        model.forward_backward(bad)
    with pytest.raises(OutOfOrder, match="lacks a part"):
        model.step(AdamParams())
    assert all(torch.equal(part, before[key]) for key, part in model.matrices.named().items())
    model.forward_backward(request("cross_entropy", data))
    model.step(AdamParams())
    assert model.steps == 1


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (AdamParams(learning_rate=float("nan")), "learning_rate is nan"),
        (AdamParams(learning_rate=-1.0), "learning_rate is -1"),
        (AdamParams(beta2=1.0), "beta2 must be below 1"),
    ],
)
def test_a_step_with_impossible_parameters_is_refused_and_clears_the_gradient(
    model: TinkerModel, params: AdamParams, said: str
) -> None:
    data, _ = batch("cross_entropy")
    model.forward_backward(request("cross_entropy", data))
    with pytest.raises((NonFiniteNumber, FieldRefused), match=said):
        model.step(params)
    with pytest.raises(OutOfOrder, match="no gradient"):
        model.step(AdamParams())
    assert model.steps == 0


@pytest.mark.parametrize("rank", [0, 100_000])
def test_a_rank_that_cannot_be_is_refused(base: SharedBase, rank: int) -> None:
    with pytest.raises(FieldRefused, match="rank"):
        TinkerModel(base, LoraShape(rank=rank))
