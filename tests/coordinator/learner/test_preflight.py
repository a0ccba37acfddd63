"""The preflight: a learner's needs are predicted from config.json alone, and rejected before a key is made."""

import copy
import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config
from typer.testing import CliRunner

from coordinator.base.children import script
from coordinator.cli import app
from coordinator.config import Config, parse
from coordinator.learner import memory
from coordinator.learner.algorithm import PRESETS
from coordinator.learner.memory import Estimate, LargestBatch, Simulations, described, estimate
from coordinator.learner.memory_plan import GIB, RESERVED_BYTES, auditors_card
from coordinator.learner.memory_plan import parse as parse_cards
from coordinator.learner.policy import TrainedPolicy
from coordinator.learner.preflight import FreeBytes, refusal, require_cards, this_machine
from coordinator.learner.settings import TrainSettings
from coordinator.model.forward import prepare
from coordinator.model.packing import imitating_card
from protocol.errors import ConfigInvalid
from tests.coordinator.learner.groups import group
from tests.live_bytes import live_bytes
from tests.processes.programs import free_address
from tests.tiny_policy import make_start

HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": 2}
SHAPES: dict[str, PreTrainedConfig] = {
    "wide layers": Qwen3Config(
        vocab_size=1024,
        hidden_size=256,
        num_hidden_layers=8,
        intermediate_size=1024,
        head_dim=64,
        tie_word_embeddings=True,
        **HEADS,
    ),
    "many words": LlamaConfig(
        vocab_size=16000,
        hidden_size=128,
        num_hidden_layers=2,
        intermediate_size=256,
        tie_word_embeddings=False,
        **HEADS,
    ),
    "five layers": LlamaConfig(
        vocab_size=1024,
        hidden_size=128,
        num_hidden_layers=5,
        intermediate_size=256,
        tie_word_embeddings=True,
        **HEADS,
    ),
    "many layers": Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=8,
        intermediate_size=192,
        head_dim=16,
        tie_word_embeddings=True,
        **HEADS,
    ),
}

NOTHING_DROPPED = PRESETS["echo2"]
PLAIN = TrainSettings(
    algorithm=NOTHING_DROPPED,
    learning_rate=1e-3,
    warmup_updates=1,
    max_completion_length=48,
    micro_batch_tokens=650,
)
WAYS = {
    "all weights": PLAIN,
    "all weights, bf16, layers twice": replace(PLAIN, dtype="bfloat16", gradient_checkpointing=True),
    "all weights, one piece": replace(PLAIN, micro_batch_tokens=0),
    "all weights, moments in bf16": replace(PLAIN, optimizer_dtype="bfloat16"),
    "LoRA, bf16": replace(PLAIN, lora_rank=8, dtype="bfloat16"),
    "entropy bonus": replace(PLAIN, algorithm=replace(NOTHING_DROPPED, entropy_bonus=0.01)),
    "LoRA, bf16, entropy bonus": replace(
        PLAIN, lora_rank=8, dtype="bfloat16", algorithm=replace(NOTHING_DROPPED, entropy_bonus=0.01)
    ),
}
BATCH = LargestBatch(groups=3, samples=8, prompt=24)
GROUPS = tuple(
    group(
        number,
        list(range(3, 3 + BATCH.prompt - number % 2)),
        [([5 + row] * PLAIN.max_completion_length, [-1.0] * PLAIN.max_completion_length, row % 2) for row in range(8)],
    )
    for number in range(BATCH.groups)
)
"""Every sample as long as it may be: what a prediction assumes."""


@cache
def simulations(shape: str) -> Simulations:
    """Return what all ways to train a shape share, as `plan` and a refusal share it."""
    described = copy.deepcopy(SHAPES[shape])
    described.dtype = torch.bfloat16
    return Simulations(described)


Starts = Callable[[str], Path]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Starts:
    """Return the policy folder of a shape; nobody changes it."""
    return cache(lambda shape: make_start(tmp_path_factory.mktemp("start"), SHAPES[shape], dtype=torch.bfloat16))


def tensor_bytes(policy: TrainedPolicy) -> int:
    """Weights, adapters and moments; gradients are gone between updates."""
    moments = [value for state in policy._optimizer.state.values() for value in state.values()]
    held = [*{*policy.model.parameters(), *policy._trained.values()}, *moments]
    return sum(tensor.nbytes for tensor in held)


def without_packed(peak: int, policy: TrainedPolicy, *, expected: int) -> int:
    """Return a peak without the copy of the largest weight in bf16 that oneDNN packs with AVX-512, as no GPU does."""
    packed: int = 2 * max(weight.numel() for weight in policy.model.parameters())
    return min(peak, peak - packed, key=lambda each: abs(each - expected))


MEASURED = [
    ("wide layers", "all weights"),
    *[
        pytest.param("wide layers", way, marks=pytest.mark.slow)
        for way in ("all weights, bf16, layers twice", "LoRA, bf16")
    ],
    *[("many words", way) for way in ("all weights", "LoRA, bf16", "entropy bonus")],  # all layers are measured
    pytest.param("many words", "LoRA, bf16, entropy bonus", marks=pytest.mark.slow),
    ("five layers", "all weights, moments in bf16"),
    ("many layers", "all weights, one piece"),
]


def test_attention_on_a_card_is_predicted_with_its_repeated_heads(start: Starts) -> None:
    policy, on_card = (
        TrainedPolicy(start("wide layers"), PLAIN),
        Estimate(simulations("wide layers"), replace(PLAIN, device="cuda"), BATCH).footprint(1, device="cuda"),
    )
    policy.train_step(GROUPS)  # before it, there are no moments
    held = tensor_bytes(policy)
    with live_bytes() as update, imitating_card():
        policy.train_step(GROUPS)
    beside = Estimate(simulations("wide layers"), PLAIN, BATCH)._beside
    on_cpu = Estimate(simulations("wide layers"), PLAIN, BATCH).footprint(1, device="cpu")
    assert on_card.phases["forward and backward"] > on_cpu.phases["forward and backward"]
    assert on_card.phases["forward and backward"] == pytest.approx(held + update.peak + beside, rel=0.1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a card may have room")
def test_a_learner_on_a_card_that_torch_cannot_use_is_refused_with_the_reason(small: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match=r"learner\.device is cuda.*(NVIDIA|CUDA)"):
        this_machine(round_of(small, tmp_path / "round"), auditor=False)


@pytest.mark.processes
@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a card may have room")
def test_no_round_is_launched_on_a_card_that_torch_cannot_use(tmp_path: Path) -> None:
    """The embedded policy fits everywhere, and an auditor computes on a card of its own, at a later launch, too."""
    (tmp_path / "round.toml").write_text(f'[round]\ndirectory = "{tmp_path / "round"}"\nlisten = "{free_address()}"\n')
    words = ["launch", str(tmp_path / "round.toml"), "--set", f"round.seeder={free_address()}", "--set"]
    refused = CliRunner().invoke(app, [*words, "learner.device=cuda"])
    assert isinstance(refused.exception, ConfigInvalid), refused.output
    assert re.match(r"learner\.device is cuda: .*(NVIDIA|CUDA)", refused.exception.message)
    assert "Join with" not in refused.output
    with pytest.raises(ConfigInvalid, match=r"audit\.device is cuda:1: .*(NVIDIA|CUDA)"):
        require_cards(parse({"audit": {"device": "cuda:1"}}), learner=True, auditor=True)
    require_cards(parse({"audit": {"device": "cuda:1"}}), learner=True, auditor=False)


@pytest.mark.processes
@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a card may have room")
@pytest.mark.parametrize(("command", "section"), [("learner", "learner"), ("auditor", "audit")])
def test_a_program_that_starts_alone_on_a_card_that_torch_cannot_use_says_so(
    tmp_path: Path, command: str, section: str
) -> None:
    (tmp_path / "round.toml").write_text(f'[round]\ndirectory = "{tmp_path / "round"}"\n')
    words = [command, str(tmp_path / "round.toml"), "--set", f"{section}.device=cuda"]
    refused = CliRunner().invoke(app, words)
    assert isinstance(refused.exception, ConfigInvalid), refused.output
    assert re.match(rf"{section}\.device is cuda: .*(NVIDIA|CUDA)", refused.exception.message)


@pytest.mark.parametrize(("shape", "way"), MEASURED)
def test_predicted_bytes_are_those_that_are_measured(shape: str, way: str, start: Starts, tmp_path: Path) -> None:
    settings = WAYS[way]
    policy = TrainedPolicy(start(shape), settings)
    policy.train_step(GROUPS)  # before it, there are no moments
    held = tensor_bytes(policy)
    with live_bytes() as update:
        policy.train_step(GROUPS)
    with live_bytes() as publication:
        (policy.writer.save_adapter if settings.lora_rank else policy.writer.save_hub)(tmp_path / "version")
    write = policy.writer.publishing(tmp_path / "beside")
    with live_bytes() as writing:  # adapters are written before the update goes on
        if not settings.lora_rank:
            write()
    predicted = Estimate(simulations(shape), settings, BATCH)
    found = predicted.footprint(1, device="cpu").phases
    beside = without_packed(writing.peak, policy, expected=predicted._beside)
    assert predicted._beside == pytest.approx(beside, rel=0.1)
    assert found["forward and backward"] == pytest.approx(held + update.peak + beside, rel=0.1)
    assert max(found["publication"], found["canary"]) == pytest.approx(held + publication.peak, rel=0.1)


@pytest.mark.parametrize(
    ("shape", "way"),
    [("many words", "all weights"), ("many layers", "all weights, bf16, layers twice"), ("wide layers", "LoRA, bf16")],
)
def test_a_self_check_is_predicted(shape: str, way: str, start: Starts) -> None:
    """The policy was just loaded; it is compared in float32, whatever the training precision."""
    policy = TrainedPolicy(start(shape), WAYS[way])
    held = tensor_bytes(policy)
    with live_bytes() as check:
        prepare(policy.model, gradient_checkpointing=WAYS[way].gradient_checkpointing)
    found = Estimate(simulations(shape), WAYS[way], BATCH).footprint(1, device="cpu").phases
    assert found["self-check"] == pytest.approx(held + check.peak, rel=0.1)


QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}


@pytest.fixture
def eight_billion(tmp_path: Path) -> Path:
    """A folder with nothing but the configuration of Qwen3-8B."""
    folder = tmp_path / "qwen3-8b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3_8B))
    return folder


def round_of(model: Path, directory: Path, **learner: Any) -> Config:
    return parse(
        {
            "round": {"directory": str(directory)},
            "model": {"path": str(model)},
            "sampling": {"max_new_tokens": 256, "samples_per_group": 4},
            "learner": {"dtype": "bfloat16", "device": "cuda", "micro_batch_tokens": 4096, **learner},
        }
    )


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A folder with nothing but the configuration of a small model; each layer costs every simulation time."""
    config: Any = copy.deepcopy(SHAPES["wide layers"])
    config.num_hidden_layers, config.layer_types = 2, config.layer_types[:2]
    config.save_pretrained(tmp_path / "small")
    return tmp_path / "small"


def test_a_refusal_names_the_phase_and_settings_that_fit(small: Path, tmp_path: Path) -> None:
    config = round_of(small, tmp_path / "round")
    needed = estimate(config, Simulations(described(config))).footprint(1, device="cuda")
    room = FreeBytes(memory=512 * GIB, disk=512 * GIB, card=needed.peak_bytes - 1)
    refused = refusal(config, room)
    assert refused is not None
    assert "forward and backward on each card needs" in refused.message
    assert "learner.gradient_checkpointing=true" in refused.hint
    assert refusal(round_of(small, tmp_path / "round", gradient_checkpointing=True), room) is None


def test_a_replay_needs_no_room_for_what_the_round_has_stored(small: Path, tmp_path: Path) -> None:
    config = round_of(small, tmp_path / "round", kept_checkpoints=8)
    needed = estimate(config, Simulations(described(config)))
    own = needed.footprint(1, device="cuda", versions=0, checkpoints=0).disk_bytes
    stored = memory.kept_versions(config), memory.kept_checkpoints(config)
    assert needed.footprint(1, device="cuda", versions=stored[0], checkpoints=stored[1]).disk_bytes > own
    assert refusal(config, FreeBytes(memory=512 * GIB, disk=own, card=512 * GIB), replay=True) is None


def test_a_refusal_simulates_no_way_to_train_whose_weights_alone_are_too_much(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated = list[TrainSettings]()

    class Recorded(Simulations):
        def activations(self, settings: TrainSettings, batch: LargestBatch) -> tuple[int, int]:
            simulated.append(settings)
            return super().activations(settings, batch)

    monkeypatch.setattr(memory, Simulations.__name__, Recorded)
    refused = refusal(round_of(small, tmp_path / "round"), FreeBytes(memory=512 * GIB, disk=512 * GIB, card=2**20))
    assert refused is not None
    assert "None of the settings tried fits" in refused.hint
    assert len(simulated) == 1, "the one that is refused"


@pytest.mark.slow
def test_a_way_to_train_needs_the_same_whatever_was_simulated_before() -> None:
    twice = replace(WAYS["LoRA, bf16"], gradient_checkpointing=True)
    ways = (twice, WAYS["LoRA, bf16"], WAYS["all weights, bf16, layers twice"])
    shared = [Estimate(simulations("five layers"), way, BATCH).footprint(2, device="cuda") for way in ways]
    alone = []
    for way in ways:
        simulations.cache_clear()
        alone.append(Estimate(simulations("five layers"), way, BATCH).footprint(2, device="cuda"))
    assert shared == alone


def test_a_disk_or_a_machine_without_room_is_named(small: Path, tmp_path: Path) -> None:
    simulations = Simulations(described(config := round_of(small, tmp_path / "round")))
    found, auditor = estimate(config, simulations).footprint(1, device="cuda"), simulations.auditor(config)
    both = FreeBytes(found.host_bytes + auditor.host_bytes, found.disk_bytes, found.peak_bytes)
    assert both.lack(found, auditor) is None
    disk = FreeBytes(512 * GIB, found.disk_bytes - 1, 79 * GIB).lack(found, auditor)
    memory = FreeBytes(found.host_bytes, 512 * GIB, 79 * GIB).lack(found, auditor)
    assert disk is not None
    assert memory is not None
    assert "on the disk" in disk.what
    assert "memory of this machine" in memory.what
    assert FreeBytes(found.host_bytes, 512 * GIB, 79 * GIB).lack(found) is None, "without an auditor"


def on_card(config: Config, device: str) -> Config:
    return config.model_copy(update={"audit": config.audit.model_copy(update={"device": device})})


def test_an_auditor_on_the_learners_card_must_fit_beside_it(small: Path, tmp_path: Path) -> None:
    config = on_card(round_of(small, tmp_path / "round"), "cuda")
    simulations = Simulations(described(config))
    learner, auditor = estimate(config, simulations).footprint(1, device="cuda"), simulations.auditor(config)
    both = learner.peak_bytes + auditor.peak_bytes + RESERVED_BYTES
    assert refusal(config, FreeBytes(512 * GIB, 512 * GIB, card=both)) is None
    refused = refusal(config, FreeBytes(512 * GIB, 512 * GIB, card=both - 1))
    assert refused is not None
    assert "with the auditor beside it on cuda" in refused.message
    assert 'audit.device="cpu"' in refused.hint


def test_an_auditor_that_does_not_fit_on_its_own_card_is_refused_by_name(small: Path, tmp_path: Path) -> None:
    config = on_card(round_of(small, tmp_path / "round"), "cuda:1")
    need = Simulations(described(config)).auditor(config)
    refused = refusal(config, FreeBytes(512 * GIB, 512 * GIB, card=512 * GIB, auditor_card=need.peak_bytes - 1))
    assert refused is not None
    assert refused.message.startswith("The auditor does not fit: rounding in float32 on cuda:1 needs")
    assert refused.hint == 'Each of these alone fits: audit.device="cpu".'


@pytest.mark.parametrize(
    ("learner", "auditor", "count", "own"),
    [
        ("cuda", "cuda", 1, ""),
        ("cuda", "cuda:0", 1, ""),
        ("cuda", "cuda:1", 1, "cuda:1"),
        ("cuda:1", "cuda:1", 1, ""),
        ("cuda:1", "cuda", 1, "cuda"),
        ("cuda", "cuda:1", 2, ""),
        ("cuda", "cuda:2", 2, "cuda:2"),
        ("cpu", "cuda", 1, "cuda"),
        ("cuda", "cpu", 1, ""),
    ],
)
def test_the_auditors_card_is_its_own_or_one_of_the_learners(learner: str, auditor: str, count: int, own: str) -> None:
    config = parse({"learner": {"device": learner}, "audit": {"device": auditor}})
    assert auditors_card(config, count) == own


def test_plan_says_of_the_embedded_policy_that_it_fits(tmp_path: Path) -> None:
    """`init` names this command as the next step, and writes a round with the embedded policy by default."""
    (tmp_path / "round.toml").write_text("")
    done = CliRunner().invoke(app, ["plan", str(tmp_path / "round.toml"), "--gpu", "8GiB:1"])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("It fits")


@pytest.mark.slow
@pytest.mark.processes
def test_launch_refuses_what_does_not_fit_before_a_key_is_made(eight_billion: Path, tmp_path: Path) -> None:
    """The folder has no weights: a rejected model is neither read nor downloaded."""
    huge = {**QWEN3_8B, "vocab_size": 2**26, "num_hidden_layers": 2}  # terabytes, on any machine
    (eight_billion / "config.json").write_text(json.dumps(huge))
    toml = tmp_path / "round.toml"
    toml.write_text(
        f'[round]\ndirectory = "{tmp_path / "round"}"\n[model]\npath = "{eight_billion}"\n',
    )
    command = [script("swarm-coordinator"), "launch", str(toml)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2, ended.stderr
    assert "in the memory of this machine needs" in ended.stderr
    assert not (tmp_path / "round").exists()


@pytest.fixture
def no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache of the hub, and a hub at a port where nothing listens."""
    for name, value in (("HF_HUB_CACHE", str(tmp_path / "hub")), ("ENDPOINT", "http://127.0.0.1:9")):
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)  # read from the environment at its import


@pytest.mark.slow
@pytest.mark.usefixtures("no_hub")
def test_plan_without_a_hub_says_so_once_and_computes_what_the_name_tells(caplog: pytest.LogCaptureFixture) -> None:
    done = CliRunner().invoke(app, ["plan", "--gpu", "8GiB:1", "--model", "hf://HuggingFaceTB/SmolLM2-135M"])
    assert done.stderr.count("The model hub cannot be reached") == 1
    assert "--model FOLDER" in done.stderr
    assert "hf://HuggingFaceTB/SmolLM2-135M: 0.13 billion parameters" in done.stdout
    assert caplog.messages == [], "the hub's client retries nothing"


@pytest.mark.usefixtures("no_hub")
def test_plan_without_a_hub_refuses_a_name_that_it_does_not_know() -> None:
    done = CliRunner().invoke(app, ["plan", "--gpu", "8GiB:1", "--model", "hf://no/such"])
    assert done.exit_code != 0
    assert "folder in hub format" in getattr(done.exception, "hint", done.output)


@pytest.mark.slow
def test_plan_prints_gib_by_phase_and_says_what_does_not_fit(eight_billion: Path) -> None:
    words = ["plan", "--gpu", "h100:2", "--model", str(eight_billion), "--set", "learner.dtype=bfloat16"]
    said = CliRunner().invoke(app, words)
    assert said.exit_code == 2
    for name in ("load", "self-check", "forward and backward", "optimizer step", "publication", "canary", "disk"):
        assert any(line.startswith(name) for line in said.output.splitlines()), name
    assert "LoRA of rank 32, layers computed twice" in said.output
    assert "does not fit" in said.output
    less = ["--set", "learner.lora_rank=16", "--set", "learner.gradient_checkpointing=true"]
    found = json.loads(CliRunner().invoke(app, [*words, *less, "--json"]).output)
    assert found["plan"]["fits"]
    assert found["plan"]["parameters"] == 8_190_735_360
    assert {way["cards"] for way in found["ways"]} == {1, 2}


@pytest.mark.parametrize(
    ("written", "gib", "count"),
    [("h100", 79.6, 1), ("H200:8", 140.4, 8), ("24GiB:2", 24.0, 2), ("80GB", 74.5, 1), ("mi300x:64", 192.0, 64)],
)
def test_cards_have_names_or_sizes(written: str, gib: float, count: int) -> None:
    cards = parse_cards(written)
    assert cards.size_bytes / GIB == pytest.approx(gib, abs=0.01)
    assert cards.count == count


@pytest.mark.parametrize("written", ["h1000", "h100:0", "h100:65", "h100:two", "24", ":2"])
def test_cards_that_nobody_knows_are_refused(written: str) -> None:
    with pytest.raises(ConfigInvalid, match="not a known card"):
        parse_cards(written)
