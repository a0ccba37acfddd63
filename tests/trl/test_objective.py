"""Equal numbers and equal gradients: the same tensors through TRL's losses and through ours.

- TRL's trainers run their own `_compute_loss`; only what a model would say is put in their hands.
- Where TRL has no counterpart (the geometric mask, the veto), the numbers by hand in tests/coordinator/learner suffice.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator.learner.advantages import advantages
from coordinator.learner.algorithm import PRESETS, Algorithm, Correction
from coordinator.learner.objective import LossTerms, policy_loss, shares
from tests.tiny_policy import make_tiny_policy

trl = pytest.importorskip("trl", reason="TRL is not installed here; `make test-trl` has it")
pytestmark = pytest.mark.filterwarnings("ignore")  # TRL warns of its own experiments and of others' deprecations

LONGEST = 16
SAMPLES, TOKENS = 8, 7
FRESH = Correction(mode="none")
"""TRL without an inference engine takes samples for fresh."""


@pytest.fixture(scope="module")
def batch() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    lengths = torch.tensor([7, 5, 1, 6, 7, 3, 2, 4])
    old = -3 * torch.rand(SAMPLES, TOKENS, generator=random)
    noise = [0.4 * torch.randn(SAMPLES, TOKENS, generator=random) for _ in range(3)]
    return {
        "mask": (torch.arange(TOKENS) < lengths[:, None]).float(),
        "old": old,
        "current": old + noise[0],
        "behaviour": old + noise[1],
        "reference": old + noise[2],
        "advantages": torch.randn(SAMPLES, generator=random),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_policy(tmp_path_factory.mktemp("policy"))


def trainer(folder: Path, kind: str = "GRPO", **options: Any) -> Any:
    """A trainer of TRL for a model that is never asked."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    arguments = getattr(trl, f"{kind}Config")(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=LONGEST,
        report_to=[],
        **{"beta": 0.0, **options},
    )
    made = getattr(trl, f"{kind}Trainer")(
        model=AutoModelForCausalLM.from_pretrained(folder),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "1+1="}] * SAMPLES),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    made.current_gradient_accumulation_steps = made.args.steps_per_generation = 1
    return made


def theirs(made: Any, batch: dict[str, torch.Tensor], **inputs: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Loss and gradient by TRL."""
    current = batch["current"].clone().requires_grad_()
    made._get_per_token_logps_and_entropies = lambda *_, **__: (current, torch.zeros_like(current), None)
    made.model.train()
    loss = made._compute_loss(
        made.model,
        {
            "prompt_ids": torch.ones(SAMPLES, 1, dtype=torch.long),
            "prompt_mask": torch.ones(SAMPLES, 1, dtype=torch.long),
            "completion_ids": torch.ones(SAMPLES, TOKENS, dtype=torch.long),
            "completion_mask": batch["mask"].long(),
            "advantages": batch["advantages"],
            "old_per_token_logps": batch["old"],
            "num_items_in_batch": batch["mask"].sum(),
            **inputs,
        },
    )
    loss.backward()
    assert current.grad is not None
    return float(loss), current.grad * batch["mask"]


def ours(algorithm: Algorithm, batch: dict[str, torch.Tensor], reference: bool = False) -> tuple[float, torch.Tensor]:
    """Loss and gradient by us."""
    mask, current = batch["mask"], (batch["current"] * batch["mask"]).requires_grad_()
    terms = LossTerms(
        behaviour=batch["behaviour"] * mask,
        mask=mask,
        shares=shares(mask, algorithm, longest=LONGEST),
        advantages=batch["advantages"],
        old=batch["old"] * mask,
        reference=batch["reference"] * mask if reference else None,
    )
    loss, _ = policy_loss(current, terms, algorithm)
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    assert current.grad is not None
    return float(loss), current.grad


def assert_equal(one: tuple[float, torch.Tensor], other: tuple[float, torch.Tensor]) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-5)
    assert torch.allclose(one[1], other[1], atol=1e-6)
    assert other[1].abs().max() > 1e-3


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("grpo", {"loss_type": "grpo", "epsilon_high": 0.28}),
        ("dapo", {"loss_type": "dapo", "epsilon_high": 0.28}),
        ("dr_grpo", {"loss_type": "dr_grpo"}),
        ("gspo", {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}),
        ("cispo", {"loss_type": "cispo", "epsilon_high": 5.0}),
        ("reinforce_pp", {"loss_type": "dapo"}),
    ],
)
def test_presets(folder: Path, batch: dict[str, torch.Tensor], name: str, options: dict[str, Any]) -> None:
    assert_equal(ours(replace(PRESETS[name], correction=FRESH), batch), theirs(trainer(folder, **options), batch))


def test_rloo(folder: Path, batch: dict[str, torch.Tensor]) -> None:
    """TRL's trainer takes one old log-probability for a sample."""
    made = trainer(folder, "RLOO")
    found = theirs(made, batch, old_logps=(batch["old"] * batch["mask"]).sum(1))
    assert_equal(ours(replace(PRESETS["rloo"], correction=FRESH), batch), found)


def test_dual_clip_and_divergence(folder: Path, batch: dict[str, torch.Tensor]) -> None:
    """The divergence as in the paper, k3; TRL's default multiplies it by the ratio."""
    options: dict[str, Any] = {"delta": 1.5, "beta": 0.3, "use_bias_correction_kl": False}
    made = trainer(folder, loss_type="dapo", epsilon_high=0.28, **options)
    algorithm = replace(PRESETS["dapo"], correction=FRESH, delta=1.5, beta=0.3)
    found = theirs(made, batch, ref_per_token_logps=batch["reference"])
    assert_equal(ours(algorithm, batch, reference=True), found)


def test_truncated_weights_of_stale_tokens(folder: Path, batch: dict[str, torch.Tensor]) -> None:
    """TRL computes them when it samples; its loss multiplies by what it is given."""
    made = trainer(folder, loss_type="dapo", epsilon_high=0.28)
    made.use_vllm, made.vllm_importance_sampling_correction = True, True
    weights = (batch["old"] - batch["behaviour"]).exp().clamp(max=1.2)
    truncated = replace(PRESETS["echo2"].correction, token_cap=1.2)
    algorithm = replace(PRESETS["dapo"], correction=truncated)
    assert_equal(ours(algorithm, batch), theirs(made, batch, importance_sampling_ratio=weights))


def test_advantages_by_trls_formula() -> None:
    """TRL divides by the deviation of a sample, √(n / (n − 1)) of ours, plus 1e-4."""
    rewards, owners = torch.tensor([1.0, 0.0, 0.0, 2.0, 5.0, 5.0, 7.0, 1.0]), torch.arange(8) // 4
    grouped = rewards.view(2, 4)
    expected = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
    found = advantages(rewards, owners, 2, PRESETS["grpo"]) * (3 / 4) ** 0.5
    assert torch.allclose(found, expected.flatten(), atol=1e-3)
