"""A trainer that is not ours, with a real node: it samples and publishes; kills and bad weights cost nothing."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from echo_swarm import Swarm as Round
from protocol.errors import ConfigInvalid, FieldRefused, MalformedMessage, NotAuthorised, NotFound
from tests.processes.programs import Swarm, said, until
from tests.processes.rounds import Coordinator, Settings, assert_ledger_is_sound, join
from tests.processes.training import child

pytestmark = pytest.mark.processes

SETTINGS: Settings = {
    "sampling": {"max_new_tokens": 4},
    "learner": {"external": True},
    "audit": {"tolerance": "torch/fp32/cpu", "first_groups": 4},
}


@pytest.fixture(scope="module")
def coordinator(swarm: Swarm, policy: Path) -> Coordinator:
    made = Coordinator(swarm, {**SETTINGS, "model": {"path": str(policy)}}).start(learner=True, auditor=True)
    made.reaches("version", 1)
    join(swarm, "node", made.join_string, "--engine", "torch")
    return made


@pytest.fixture
def key(swarm: Swarm, coordinator: Coordinator, request: pytest.FixtureRequest) -> str:
    name = request.node.name[:60]
    words = (str(coordinator.config_file), name, "--budget", "1000000", "--publishes")
    return said(swarm, "swarm-coordinator", "api-keys", "create", *words).split()[1]


@pytest.fixture
def trainer(coordinator: Coordinator, key: str) -> Iterator[Round]:
    with Round(coordinator.join_string, key) as made:
        yield made


def changed(policy: Path, folder: Path, factor: float) -> Path:
    """Return a folder with the policy's weights, each times a factor, and nothing else."""
    folder.mkdir()
    tensors = load_file(policy / "model.safetensors")
    save_file(
        {name: tensor * tensor.dtype.type(factor) for name, tensor in tensors.items()}, folder / "model.safetensors"
    )
    return folder


def test_a_trainer_samples_publishes_and_samples_with_its_version(
    coordinator: Coordinator, trainer: Round, policy: Path, tmp_path: Path
) -> None:
    first, second = trainer.sample(["12+34=", "5+6="], n=3, seed=7)
    assert (first.version, len(first.samples)) == (1, 3)
    assert len(second.prompt_token_ids) < len(first.prompt_token_ids)
    for sample in first.samples:
        assert len(sample.token_ids) == len(sample.logprobs) <= 4
        assert len(sample.receipt) == 64
    version = trainer.publish(changed(policy, tmp_path / "changed", 0.5))
    assert version == trainer.versions().newest == 2
    assert trainer.publish(tmp_path / "changed") == 2, "the same weights again change nothing"
    (again,) = trainer.sample(["12+34="], n=3, seed=7, version=2)
    assert again.version == 2
    assert again.prompt_token_ids == first.prompt_token_ids
    assert again.samples != first.samples
    budget = trainer.budget()
    until("the answers to be charged", lambda: trainer.budget().reserved_micros == 0)
    assert 0 < budget.spent_micros <= 9 * 4
    assert coordinator.status()["update"] == 0, "nothing is trained here"


def test_a_refused_prompt_raises_its_own_error_and_the_others_cost_nothing_more(trainer: Round) -> None:
    with pytest.raises(NotFound, match="swarm@99"):
        trainer.sample(["1+2=", "3+4="], version=99)
    with pytest.raises(MalformedMessage, match="not empty"):
        trainer.sample([[], "1+2="])
    with pytest.raises(FieldRefused, match="one text"):
        trainer.sample("1+2=")
    until("the withdrawn queries to end", lambda: trainer.budget().reserved_micros == 0)


def test_weights_that_cannot_be_used_are_refused_by_name(
    coordinator: Coordinator, trainer: Round, policy: Path, tmp_path: Path
) -> None:
    before = trainer.versions().newest
    with pytest.raises(ConfigInvalid, match="NaN or infinite"):
        trainer.publish(changed(policy, tmp_path / "nan", float("nan")))
    other = changed(policy, tmp_path / "other", 1.0)
    tensors = load_file(other / "model.safetensors")
    embedding = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, other / "model.safetensors")
    with pytest.raises(ConfigInvalid, match="in this round's policy"):
        trainer.publish(other)
    tensors |= {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.copy()}
    save_file(tensors, other / "model.safetensors")
    with pytest.raises(ConfigInvalid, match=r"lm_head\.weight .* leave its copy out"):
        trainer.publish(other)
    tensors.pop("lm_head.weight")
    tensors["model.norm.weight"].fill(3e38)
    save_file(tensors, other / "model.safetensors")
    with pytest.raises(ConfigInvalid, match=r"give NaN or infinite log-probabilities.* has diverged"):
        trainer.publish(other)
    with pytest.raises(ConfigInvalid, match="no weights"):
        trainer.publish(tmp_path)
    assert trainer.versions().newest == before


def test_only_what_changed_is_sent_and_the_version_is_the_same_to_the_bit(
    coordinator: Coordinator,
    trainer: Round,
    key: str,
    policy: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "echo_swarm")
    folder = changed(policy, tmp_path / "changed", 0.9)
    whole = trainer.publish(folder)
    nudge(folder, 1)
    patched = trainer.publish(folder)
    with Round(coordinator.url, key) as other:
        nudge(folder, 2)
        assert other.publish(folder) == patched + 1
    nudge(folder, 3)
    last = trainer.publish(folder)
    assert (patched, last) == (whole + 1, whole + 3)
    sizes = [int(size) for size in re.findall(r"sent_bytes=(\d+)", caplog.text)]
    file = coordinator.folder / "uploads" / str(last) / "model.safetensors"
    size = file.stat().st_size
    assert sizes[1] < size // 20, "the base is what this trainer sent before"
    assert (sizes[0], sizes[2], sizes[3]) == (size, size, size), "the base is not at hand: the file is sent whole"
    published = load_file(file)
    expected = load_file(folder / "model.safetensors")
    assert published.keys() == expected.keys()
    assert all(published[name].tobytes() == tensor.tobytes() for name, tensor in expected.items())


def nudge(folder: Path, number: int) -> None:
    """Change one weight of a policy."""
    tensors = load_file(folder / "model.safetensors")
    tensors[sorted(tensors)[0]].flat[number] += 1
    save_file(tensors, folder / "model.safetensors")


def test_a_learners_process_that_is_killed_publishes_the_offer_all_the_same(
    coordinator: Coordinator, trainer: Round, policy: Path, tmp_path: Path
) -> None:
    before = trainer.versions().newest
    child(coordinator, "learner").kill()
    assert trainer.publish(changed(policy, tmp_path / "changed", 0.25)) == before + 1


def test_a_coordinator_that_is_killed_loses_no_version_and_no_credit(
    coordinator: Coordinator, trainer: Round, policy: Path, tmp_path: Path
) -> None:
    version = trainer.publish(changed(policy, tmp_path / "changed", 0.75))
    coordinator.program.kill()
    coordinator.start(learner=True, auditor=True)
    assert trainer.versions().newest == version
    assert trainer.publish(changed(policy, tmp_path / "next", 0.8)) == version + 1
    (rollout,) = trainer.sample(["1+2="], version=version + 1)
    assert rollout.version == version + 1
    assert_ledger_is_sound(coordinator)


def test_a_key_without_the_right_samples_and_does_not_publish(
    swarm: Swarm, coordinator: Coordinator, policy: Path
) -> None:
    key = said(
        swarm, "swarm-coordinator", "api-keys", "create", str(coordinator.config_file), "reader", "--budget", "1000"
    )
    with Round(coordinator.url, key.split()[1]) as reader:
        assert reader.sample(["1+2="])[0].samples
        with pytest.raises(NotAuthorised):
            reader.publish(policy)


def test_a_finished_round_gives_no_work_and_settles_what_nodes_are_owed(
    swarm: Swarm, coordinator: Coordinator, trainer: Round
) -> None:
    trainer.sample(["1+2="])
    words = ("finish", str(coordinator.config_file), "--yes")
    assert said(swarm, "swarm-coordinator", *words) == "The round is finished.\n"
    assert said(swarm, "swarm-coordinator", *words) == "The round was finished before.\n"
    until("all audits and payments", lambda: not coordinator.status()["audit"]["unsettled"])
    assert coordinator.status()["finished"]
    assert_ledger_is_sound(coordinator)
