"""Memory of the learner, in bytes of live tensors for each parameter of the policy."""

import copy
import json
import platform
import resource
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from coordinator.audit.scorer import BODY_TOKENS_MAX, VersionScorer
from coordinator.config import Config, parse
from coordinator.learner.memory import PROCESS_BYTES, AuditorNeed, LargestBatch, auditor_need, measures_rounding
from coordinator.learner.policy import TrainedPolicy
from coordinator.learner.publication import HubFiles, scored_canary
from coordinator.learner.settings import TrainSettings
from coordinator.model.batch import collate
from coordinator.model.loading import return_freed_memory
from coordinator.rules.replay import Prefill
from protocol.policy import adapter, canary
from swarm_exact.merging import merged
from tests.coordinator.learner.groups import UNEQUAL
from tests.coordinator.learner.test_preflight import SHAPES
from tests.live_bytes import live_bytes
from tests.tiny_policy import make_other_policy, make_start

SETTINGS = TrainSettings(learning_rate=1e-2, warmup_updates=1)
ADAPTERS = replace(SETTINGS, lora_rank=4)

SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "eos_token_id": 2,
}
LARGE = {**SMALL, "vocab_size": 4096, "hidden_size": 512, "num_hidden_layers": 16, "intermediate_size": 1536}
"""52 million parameters, a layer's a seventeenth of them: what is held twice shows."""

FAMILIES = {
    "tied head": (Qwen3Config(**SMALL, head_dim=8, tie_word_embeddings=True), torch.bfloat16),
    "own head": (LlamaConfig(**SMALL, tie_word_embeddings=False), torch.float16),
    "float32": (LlamaConfig(**SMALL, tie_word_embeddings=False), torch.float32),
    "experts": (
        Qwen3MoeConfig(**SMALL, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2),
        torch.bfloat16,
    ),
}


def saved_at_once(policy: TrainedPolicy, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Write what transformers writes of whole weights that all lie in memory."""
    dtype = policy._published_dtype
    policy.model.save_pretrained(folder, state_dict={name: weight.to(dtype) for name, weight in weights.items()})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "dtype": str(dtype).removeprefix("torch.")}, indent=2, sort_keys=True) + "\n"
    )
    for source in policy._folder.glob("*token*"):
        shutil.copyfile(source, folder / source.name)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy folder; nobody changes it."""
    config = Qwen3Config(**LARGE, head_dim=128, tie_word_embeddings=True)
    return make_start(tmp_path_factory.mktemp("large"), config, dtype=torch.bfloat16)


def trained(folder: Path, settings: TrainSettings) -> TrainedPolicy:
    policy = TrainedPolicy(folder, settings)
    policy.train_step(UNEQUAL)
    return policy


def masters(policy: TrainedPolicy) -> dict[str, torch.Tensor]:
    return {name: weight.detach().float() for name, weight in policy.model.named_parameters()}


def with_what_was_learned(policy: TrainedPolicy) -> dict[str, torch.Tensor]:
    """The weights with their adapters in them."""
    adapters: Any = policy._adapters
    return {
        name: merged(name, weight, adapters.down[index].detach(), adapters.up[index].detach(), adapters._scale)
        if (index := adapters._of_weight.get(name)) is not None
        else weight
        for name, weight in masters(policy).items()
    }


def same_files(found: Path, wanted: Path) -> None:
    """Every file but the canary has the same bytes in both folders."""
    ours, theirs = (
        {path.name: path.read_bytes() for path in folder.iterdir() if path.name != canary.FILE_NAME}
        for folder in (found, wanted)
    )
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


def said_by(policy: TrainedPolicy, weights: dict[str, torch.Tensor]) -> tuple[float, ...]:
    """The canary of a model into which these weights, rounded as they are published, are copied."""
    before = masters(policy)
    adapters: Any = policy._adapters
    with torch.no_grad():
        for name, weight in policy.model.named_parameters():
            weight.copy_(weights[name].to(policy._published_dtype))
        if adapters:
            adapters._silent = True
        said = scored_canary(policy.model, policy.writer._canary_text).logprobs
        for name, weight in policy.model.named_parameters():
            weight.copy_(before[name])
        if adapters:
            adapters._silent = False
    return said


def canary_of(folder: Path) -> tuple[float, ...]:
    return tuple(json.loads((folder / canary.FILE_NAME).read_text())["logprobs"])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("settings", [SETTINGS, ADAPTERS], ids=["full", "adapters"])
def test_a_version_has_the_bytes_that_transformers_would_write(
    family: str, settings: TrainSettings, tmp_path: Path
) -> None:
    config, dtype = FAMILIES[family]
    policy = trained(make_start(tmp_path / "start", config, dtype=dtype), settings)
    weights = with_what_was_learned(policy) if settings.lora_rank else masters(policy)
    before = [weight.clone() for weight in policy.model.parameters()]
    policy.writer.save_hub(tmp_path / "version")
    saved_at_once(policy, weights, tmp_path / "at once")
    same_files(tmp_path / "version", tmp_path / "at once")
    assert canary_of(tmp_path / "version") == said_by(policy, weights)
    assert all(torch.equal(old, new) for old, new in zip(before, policy.model.parameters(), strict=True))


def test_a_base_and_its_adapter_have_the_bytes_that_transformers_would_write(tmp_path: Path) -> None:
    config, dtype = FAMILIES["tied head"]
    policy = trained(make_start(tmp_path / "start", config, dtype=dtype), ADAPTERS)
    policy.writer.save_base(tmp_path / "base")
    saved_at_once(policy, masters(policy), tmp_path / "at once")
    same_files(tmp_path / "base", tmp_path / "at once")
    policy.writer.save_adapter(tmp_path / "adapter")
    adapters: Any = policy._adapters
    by_nodes = {
        name: adapters.as_nodes_merge(name, weight, slice(0, len(weight)), dtype)
        for name, weight in masters(policy).items()
    }
    assert canary_of(tmp_path / "adapter") == said_by(policy, by_nodes)
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {*adapter.FILES, canary.FILE_NAME}


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"experts"}))
def test_weights_in_several_files_have_the_bytes_that_transformers_would_write(family: str, tmp_path: Path) -> None:
    config, dtype = FAMILIES[family]
    policy = TrainedPolicy(make_start(tmp_path / "start", config, dtype=dtype), SETTINGS)
    weights = {name: weight.to(dtype) for name, weight in masters(policy).items()}
    files = HubFiles(policy.model, dtype, {}, part_size="20KB")
    with files.open(tmp_path / "parts") as write:
        for names in files.together:
            write({name: weights[name] for name in names})
    policy.model.save_pretrained(tmp_path / "at once", state_dict=dict(weights), max_shard_size="20KB")
    written = {path.name: path.read_bytes() for path in (tmp_path / "parts").iterdir()}
    assert len(written) > 2
    assert written == {name: (tmp_path / "at once" / name).read_bytes() for name in written}
    assert len(list((tmp_path / "at once").glob("model*"))) == len(written)


def test_experts_in_several_files_are_loaded_as_they_were(tmp_path: Path) -> None:
    """Transformers keeps all experts of a layer in one file; each goes where there is room, and that is as good."""
    config, dtype = FAMILIES["experts"]
    policy = TrainedPolicy(make_start(tmp_path / "start", config, dtype=dtype), SETTINGS)
    files = HubFiles(policy.model, dtype, {}, part_size="20KB")
    weights = {name: weight.to(dtype) for name, weight in masters(policy).items()}
    policy.writer.save_hub(tmp_path / "version")
    (tmp_path / "version" / "model.safetensors").unlink()
    with files.open(tmp_path / "version") as write:
        for names in files.together:
            write({name: weights[name] for name in names})
    assert len(list((tmp_path / "version").glob("*.safetensors"))) > 1
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "version").state_dict()
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())


def total_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def held_bytes(policy: TrainedPolicy) -> int:
    """Weights, adapters, gradients and what the optimizer remembers."""
    weights = {*policy.model.parameters(), *policy._trained.values()}
    moments = [value for state in policy._optimizer.state.values() for value in state.values()]
    return total_bytes(weights) + total_bytes(w.grad for w in weights if w.grad is not None) + total_bytes(moments)


@pytest.mark.parametrize(
    ("settings", "method", "most"),
    [(SETTINGS, "save_hub", 16.5), (ADAPTERS, "save_adapter", 2.5)],
    ids=["full", "LoRA"],
)
def test_publishing_holds_no_second_copy_of_the_weights(
    settings: TrainSettings, method: str, most: float, large: Path, tmp_path: Path
) -> None:
    policy = trained(large, settings)
    held = held_bytes(policy)
    with live_bytes() as count:
        getattr(policy.writer, method)(tmp_path / "version")
    assert (held + count.peak) / policy.model.num_parameters() <= most
    assert count.left < 2**16, "something of the publication stays"


@pytest.mark.parametrize("settings", [SETTINGS, ADAPTERS], ids=["full", "LoRA"])
def test_products_in_bf16_need_no_second_copy_of_the_weights(settings: TrainSettings, large: Path) -> None:
    """An update holds weights, moments and gradients: 16 bytes; of a base that is not trained, 2."""
    policy = trained(large, replace(settings, dtype="bfloat16", gradient_checkpointing=True))
    held = held_bytes(policy)
    with live_bytes() as count:
        policy.train_step(UNEQUAL)
    assert (held + count.peak) / policy.model.num_parameters() <= (2.5 if settings.lora_rank else 16.5)


GLIBC = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only glibc keeps freed blocks, and can return them"
)


@contextmanager
def freed_blocks() -> Iterator[Callable[[], bool]]:
    """Free 64 MiB that glibc keeps, as one block above them is in use; yield a function: True if most are returned."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    large = torch.ones(30 * 2**18)
    del large  # from now on glibc keeps blocks up to this size
    blocks = [torch.ones(2**18) for _ in range(65)]
    del blocks[:-1]
    before = resident()
    yield lambda: before - resident() >= 32 * 2**20


@GLIBC
def test_freed_blocks_between_blocks_in_use_go_back_to_the_system() -> None:
    with freed_blocks() as are_returned:
        assert not are_returned()
        return_freed_memory(torch.device("cpu"))
        assert are_returned()


@GLIBC
@pytest.mark.parametrize("passes", ["forward", "backward"])
def test_an_update_returns_freed_memory_between_layers(passes: str, tmp_path: Path) -> None:
    settings = replace(SETTINGS, gradient_checkpointing=True)
    policy = TrainedPolicy(make_start(tmp_path / "start", FAMILIES["float32"][0], dtype=torch.float32), settings)
    logprobs, _ = policy.model.completion_logprobs(collate(UNEQUAL), torch.arange(2), settings.products)
    with freed_blocks() as are_returned:
        if passes == "forward":
            policy.model.completion_logprobs(collate(UNEQUAL), torch.arange(2), settings.products)
        else:
            logprobs.sum().backward()
        assert are_returned()


def test_a_base_that_is_not_trained_is_as_large_as_it_came_and_learns_the_same(tmp_path: Path) -> None:
    """Equal numbers in bf16 and in float32: what is learned beside them is bit for bit the same."""
    config, _ = FAMILIES["tied head"]
    narrow = make_start(tmp_path / "bf16", config, dtype=torch.bfloat16)
    wide = shutil.copytree(narrow, tmp_path / "float32")
    AutoModelForCausalLM.from_pretrained(narrow, dtype=torch.float32).save_pretrained(wide)
    for dtype in ("float32", "bfloat16"):
        ours, theirs = (trained(folder, replace(ADAPTERS, dtype=dtype)) for folder in (narrow, wide))
        assert total_bytes(ours.model.parameters()) < 0.6 * total_bytes(theirs.model.parameters())
        assert all(torch.equal(a, b) for a, b in zip(ours._trained.values(), theirs._trained.values(), strict=True))


PROMPT, LENGTH, SAMPLES = 40, 120, 8
GROUPS = BODY_TOKENS_MAX // (PROMPT + SAMPLES * LENGTH)
"""Groups that fill one pass."""


def round_of(**audit: Any) -> Config:
    sampling = {"max_new_tokens": LENGTH, "samples_per_group": SAMPLES}
    return parse({"sampling": sampling, "audit": audit})


def predicted(shape: str, dtype: torch.dtype, **audit: Any) -> AuditorNeed:
    described = copy.deepcopy(SHAPES[shape])
    described.dtype = dtype
    batch = LargestBatch(groups=GROUPS, samples=SAMPLES, prompt=PROMPT)
    return auditor_need(round_of(**audit), described, batch.fullest_piece(BODY_TOKENS_MAX, LENGTH))


def claims() -> list[Prefill]:
    """Return claims as long as they may be, drawn at temperatures of their own."""
    chance = np.random.Generator(np.random.Philox(7))
    return [
        Prefill(
            chance.integers(3, 300, PROMPT - number % 2).astype(np.uint32),
            [chance.integers(3, 300, LENGTH).astype(np.uint32) for _ in range(SAMPLES)],
            number,
            1.0,
            0.7,
        )
        for number in range(GROUPS)
    ]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ("many layers", torch.bfloat16),
        pytest.param("many words", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("wide layers", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("five layers", torch.float32, marks=pytest.mark.slow),
    ],
)
def test_predicted_bytes_of_a_replay_are_those_that_are_measured(
    shape: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    scorer = VersionScorer(make_other_policy(tmp_path / "version", SHAPES[shape], dtype=dtype))
    version = sum(weight.nbytes for weight in scorer._model.parameters())
    with live_bytes() as replay:
        scorer.score(claims())
    need = predicted(shape, dtype)
    assert need.loaded_bytes == version
    assert need.phases["replay"] - 2 * version == pytest.approx(replay.peak, rel=0.1)


def test_rounding_needs_a_version_in_16_bits_unless_no_node_may_compute_so() -> None:
    need = predicted("five layers", torch.bfloat16)
    assert need.phases["rounding"] - need.phases["replay"] == 2 * need.parameters
    assert "rounding" not in predicted("five layers", torch.bfloat16, classes=["torch/fp32/cpu"]).phases
    assert measures_rounding(["torch/fp32/cpu", "vllm/bf16/cuda"])


def test_weights_for_a_card_pass_through_the_memory_of_the_machine() -> None:
    on_card, on_cpu = (predicted("five layers", torch.bfloat16, device=device) for device in ("cuda:1", "cpu"))
    assert on_card.host_bytes == PROCESS_BYTES["cuda"] + on_card.loaded_bytes
    assert on_cpu.host_bytes == PROCESS_BYTES["cpu"] + on_cpu.peak_bytes
