"""Several ranks train what one process trains: real processes, which talk over gloo; those that hang under torchrun."""

import json
import os
import subprocess
import sys
from math import ceil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from coordinator.learner import checkpoint
from coordinator.learner.policy import TrainedPolicy
from coordinator.learner.ranks import Ranks
from coordinator.model.batch import collate, pieces
from coordinator.model.watchdog import Watchdog
from protocol.policy import canary
from tests.coordinator.learner import loading_rank, two_ranks
from tests.coordinator.learner.groups import UNEQUAL
from tests.coordinator.learner.two_ranks import BATCHES, SCENARIOS, UPDATES, train

EXACT = sorted(SCENARIOS.keys() - {"bf16"})
ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.processes


def torchrun(program: Path) -> subprocess.CompletedProcess[str]:
    """Run a program as two ranks."""
    command: list[str | Path] = [
        Path(sys.executable).with_name("torchrun"), "--nproc-per-node", "2", "--rdzv-backend", "c10d",
        "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1", program,
    ]  # fmt: skip
    here = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(command, env=os.environ | here, stderr=subprocess.PIPE, text=True, check=False)


def forks(program: ModuleType, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a program that forks its ranks."""
    command = [sys.executable, "-m", program.__name__, *words]
    return subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)


@pytest.fixture(scope="module")
def results(policy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the results of every scenario by one process and by two: `one`, `two`, and `back` to one."""
    top = tmp_path_factory.mktemp("ranks")
    for name, settings in SCENARIOS.items():
        train(policy_folder, settings, top / "one" / name, Ranks())
    ended = forks(two_ranks, policy_folder, top / "one", top / "two")
    assert ended.returncode == 0, ended.stderr
    return top


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def furthest(one: Path, other: Path) -> float:
    """Return the largest difference between two published policies."""
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def metrics(folder: Path) -> list[dict[str, float]]:
    found: list[dict[str, float]] = json.loads((folder / "metrics.json").read_text())
    return found


@pytest.mark.parametrize("name", EXACT)
def test_two_ranks_come_to_the_weights_of_one_process(results: Path, name: str) -> None:
    one, two = results / "one" / name, results / "two" / name
    assert furthest(one / "fifth", two / "fifth") < 1e-5
    assert furthest(one / "fifth", one / "sixth") > 1e-4, "nothing was learned"
    for ours, theirs in zip(metrics(one), metrics(two), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4, rel=1e-3)


def test_products_in_bf16_are_those_of_one_process_but_for_their_order(results: Path) -> None:
    one, two = results / "one" / "bf16", results / "two" / "bf16"
    ours, theirs = weights(one / "fifth"), weights(two / "fifth")
    assert 0 < furthest(one / "fifth", two / "fifth") < 5 * 1e-3, "Adam moves no weight further than the rate"
    first, second = (torch.cat([found[name].flatten() for name in sorted(ours)]) for found in (ours, theirs))
    assert torch.cosine_similarity(first, second, dim=0) > 0.9999


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_two_ranks_go_on_from_the_checkpoint_of_one(results: Path, name: str) -> None:
    one, resumed = results / "one" / name, results / "two" / f"{name}, resumed"
    assert furthest(one / "fifth", resumed / "fifth") == 0.0, "a restored policy is bit for bit the same"
    assert furthest(one / "sixth", resumed / "sixth") < (1e-5 if name in EXACT else 1e-3)
    assert len(metrics(resumed)) == 1, "an update was made again"


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_one_process_goes_on_from_the_checkpoint_of_two(results: Path, policy_folder: Path, name: str) -> None:
    policy = TrainedPolicy(policy_folder, SCENARIOS[name])
    last = checkpoint.newest(results / "two" / name / "checkpoints")
    assert last
    assert policy.restore(last)["update"] == policy.update == UPDATES
    step = policy.train_step(BATCHES[UPDATES])
    policy.writer.save_hub(results / "back" / name)
    assert furthest(results / "back" / name, results / "two" / name / "sixth") < (1e-5 if name in EXACT else 1e-3)
    assert step.metrics == pytest.approx(metrics(results / "two" / name)[-1], abs=1e-4, rel=0.02)


PUBLISHED = [*((name, "fifth") for name in sorted(SCENARIOS)), ("adapters", "base"), ("adapters", "adapter")]


@pytest.mark.parametrize(("name", "folder"), PUBLISHED)
def test_what_two_ranks_publish_is_byte_for_byte_what_one_exports(results: Path, name: str, folder: str) -> None:
    """The exports are from the same checkpoint, canary included; trained apart, the last bits of sums would differ."""
    one, two = results / "one" / name / folder, results / "two" / f"{name}, resumed" / folder
    ours, theirs = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in (one, two))
    assert folder == "base" or canary.FILE_NAME in ours
    assert ours == theirs


@pytest.mark.parametrize("budget", [0, 60])
def test_every_hand_gets_as_many_pieces_of_about_the_same_size(budget: int) -> None:
    """A piece more than there are processes would make all of them compute twice."""
    data = collate([group for group in UNEQUAL for _ in range(20)])
    everything = torch.arange(len(data.rewards))
    alone = len(pieces(data, everything, budget))
    for hands in (1, 2, 3, 8):
        found = pieces(data, everything, budget, hands=hands)
        assert sorted(torch.cat(found).tolist()) == everything.tolist()
        assert len(found) == hands * ceil(alone / hands)
        sizes = [
            int(data.lengths[piece].sum()) + sum(len(data.prompts[n]) for n in set(data.owners[piece].tolist()))
            for piece in found
        ]
        assert max(sizes) <= (budget or max(sizes))
        assert max(sizes) < 2 * sum(sizes) / len(sizes)


@pytest.fixture(scope="module")
def hundred_million(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bf16 policy of 97 million parameters, large enough for its weights to outweigh everything else."""
    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=1024,
        num_hidden_layers=7,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=128,
        intermediate_size=3072,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("hundred million")
    with torch.random.fork_rng(), torch.device("meta"):
        model: Any = Qwen3ForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(0.5)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("purpose", "each", "ranks"),
    [
        pytest.param("trained", 4, 1, marks=pytest.mark.slow),
        ("trained", 4, 2),
        pytest.param("frozen", 2, 4, marks=pytest.mark.slow),
    ],
)
def test_a_rank_loads_its_share_of_the_weights_and_no_more(
    policy_folder: Path, hundred_million: Path, ranks: int, purpose: str, each: int, tmp_path: Path
) -> None:
    ended = forks(loading_rank, str(ranks), policy_folder, hundred_million, purpose, tmp_path)
    assert ended.returncode == 0, ended.stderr
    for rank in range(ranks):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) <= each / ranks + 0.5


HANGS = """
import sys, threading
from coordinator.learner.ranks import Ranks
from coordinator.model.watchdog import Watchdog

ranks = Ranks(watchdog=Watchdog(3.0))

def hang_for_ever():
    threading.Event().wait()

def wait_for_the_other():
    ranks.meet()

ranks.meet()  # how long the other takes to start is not watched
with ranks.watchdog.watching():
    hang_for_ever() if ranks.rank == 1 else wait_for_the_other()
"""


def test_a_rank_that_hangs_ends_all_with_a_stack(tmp_path: Path) -> None:
    program = tmp_path / "hangs.py"
    program.write_text(HANGS)
    ended = torchrun(program)
    assert ended.returncode != 0
    # torchrun ends the others as soon as one has ended, on a busy machine in the middle of their stacks.
    assert "in hang_for_ever" in ended.stderr or "in wait_for_the_other" in ended.stderr


def test_who_waits_for_the_coordinator_is_not_watched() -> None:
    code = (
        "from coordinator.model.watchdog import Watchdog\n"
        "import time\n"
        "dog = Watchdog(0.2)\n"
        "with dog.watching():\n"
        "    pass\n"
        "dog.moved()\n"
        "until = time.monotonic() + 1.0\n"
        "while time.monotonic() < until:\n"
        "    pass\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_one_process_deals_to_itself_alone() -> None:
    ranks: Any = Ranks(watchdog=Watchdog(0.0))
    assert list(ranks.deal(iter("abc"))) == [("a", True), ("b", True), ("c", True)]
