"""The side branch of a retraction: what a run would be that never saw the groups, bit for bit, also after kills."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from coordinator.commands.retract import require_room
from coordinator.config import Config
from coordinator.learner import checkpoint, preflight, retracting
from coordinator.learner.crew import Crew
from coordinator.learner.policy import TrainedPolicy
from coordinator.learner.ranks import Ranks
from coordinator.learner.retracting import SideBranch
from coordinator.learner.settings import train_settings
from coordinator.rules.retraction import KeptState
from protocol.errors import ConfigInvalid
from protocol.work.learning import TrainingGroup
from tests.coordinator.learner.groups import UNEQUAL, group

BAD = group(9, [19, 20, 31], [([25, 2], [-1.0, -0.5], 5.0), ([22, 21, 2], [-2.0, -1.0, -0.1], -5.0)])
BATCHES: dict[int, tuple[TrainingGroup, ...]] = {
    1: UNEQUAL,
    2: UNEQUAL[:2],
    3: (UNEQUAL[0], BAD, UNEQUAL[1]),
    4: (BAD, BAD),
    5: (*UNEQUAL[1:], BAD),
    6: UNEQUAL,
}
"""Batch 3 is the first with a group to leave out, and 4 has no other."""
OWNERS = ("an owner",)


def clean(groups: tuple[TrainingGroup, ...]) -> tuple[TrainingGroup, ...]:
    return tuple(each for each in groups if each.claim_id != BAD.claim_id)


def config_of(folder: Path, start: Path, learner: dict[str, Any], objective: dict[str, Any]) -> Config:
    return Config.model_validate(
        {
            "round": {"directory": folder, "max_updates": 100},
            "model": {"path": str(start)},
            "learner": {"learning_rate": 0.01, "warmup_updates": 1, "kept_checkpoints": 2, **learner},
            "objective": objective,
            "correction": {"mode": "none"},
        }
    )


def trained(config: Config) -> Crew:
    """The learner of a round that trained on all batches, and kept its checkpoints."""
    crew = Crew(config, Ranks())
    for number, groups in BATCHES.items():
        crew.save(taken=0, dense=config.learner.kept_checkpoints)
        crew.train(groups)
        assert crew.policy.update == number
    return crew


def never_saw_them(config: Config) -> TrainedPolicy:
    policy = TrainedPolicy(config.round.directory / "learner" / "start", train_settings(config))
    for groups in BATCHES.values():
        if rest := clean(groups):
            policy.train_step(rest)
        else:
            policy.update += 1
    return policy


def branch(config: Config, start: KeptState) -> SideBranch:
    return SideBranch(config, Ranks(), start, OWNERS)


@pytest.mark.parametrize(
    ("learner", "objective"),
    [
        ({}, {}),
        ({"algorithm": "echo2"}, {"beta": 0.1, "entropy_bonus": 0.01}),
        ({"num_iterations": 2}, {"minibatches": 3}),
        ({"optimizer_dtype": "bfloat16", "weight_decay": 0.1}, {"trajectories": "weighted", "trajectory_share": 0.5}),
        ({"lora_rank": 4, "lora_coverage_min": 0.0}, {}),
        ({"lora_rank": 4, "lora_coverage_min": 0.0, "publish_adapters": False}, {}),
    ],
    ids=["grpo", "reference", "minibatches", "small moments", "adapters", "merged adapters"],
)
def test_the_result_is_that_of_a_run_that_never_saw_the_groups(
    learner: dict[str, Any], objective: dict[str, Any], policy_folder: Path, tmp_path: Path
) -> None:
    config = config_of(tmp_path, policy_folder, learner, objective)
    crew = trained(config)
    crew.publish(tmp_path / "poisoned")
    states = retracting.kept_states(tmp_path / "learner")
    assert KeptState(2) in states
    made = branch(config, KeptState(2))
    assert not made.continues
    for number in range(3, 7):
        made.train(clean(BATCHES[number]))
    root = made.finish(tmp_path / "result")
    wanted = never_saw_them(config)
    assert root == wanted.rooting()()
    assert root != crew.rooting()()

    assert {each.name for each in (tmp_path / "result").iterdir()} == {
        each.name for each in (tmp_path / "poisoned").iterdir()
    }
    weights = "adapter_model.safetensors" if learner.get("publish_adapters", "lora_rank" in learner) else ""
    ours = load_file(tmp_path / "result" / (weights or "model.safetensors"))
    theirs = load_file(tmp_path / "poisoned" / (weights or "model.safetensors"))
    assert any(not ours[name].equal(theirs[name]) for name in ours)

    crew.restore(retracting.result(tmp_path / "learner", root))
    assert (crew.policy.update, crew.rooting()()) == (6, root)
    crew.train(UNEQUAL)
    wanted.train_step(UNEQUAL)
    assert crew.rooting()() == wanted.rooting()(), "the learner goes on with the optimizer of the result"


def test_without_a_checkpoint_the_replay_begins_with_the_starting_policy(policy_folder: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, policy_folder, {"kept_checkpoints": 0}, {})
    trained(config)
    (start, newest) = retracting.kept_states(tmp_path / "learner")
    assert start == KeptState(0, is_start=True)
    assert newest.update == 5
    made = branch(config, start)
    for number in range(1, 7):
        made.train(clean(BATCHES[number]))
    assert made.finish(tmp_path / "result") == never_saw_them(config).rooting()()


def test_work_of_other_owners_is_not_continued_and_results_in_use_stay(policy_folder: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, policy_folder, {}, {})
    trained(config)
    learner = tmp_path / "learner"
    made = branch(config, KeptState(2))
    made.train(clean(BATCHES[3]))
    made.save()
    assert retracting.begun(learner, OWNERS) == KeptState(2)
    assert branch(config, KeptState(2)).update == 3
    other = SideBranch(config, Ranks(), KeptState(2), ("another",))
    assert (other.continues, other.update) == (False, 2)
    assert retracting.begun(learner, OWNERS) is None
    first = other.finish(tmp_path / "first")
    other.train(UNEQUAL)
    second = other.finish(tmp_path / "second", in_use=first)
    assert retracting.result(learner, first).name == "000000002"
    other.train(UNEQUAL)
    other.finish(tmp_path / "third", in_use=second)
    with pytest.raises(ConfigInvalid, match="is not in"):
        retracting.result(learner, first)
    retracting.remove_done(learner, ("another",))
    assert not (learner / retracting.WORK).exists()


def test_the_embedded_policy_is_warm_started_before_the_replay(
    policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, policy_folder, {"kept_checkpoints": 0}, {})
    trained(config)
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": "embedded"})})
    warmed: list[int] = []

    def warm(crew: Crew, _progress: object) -> None:
        warmed.append(crew.policy.update)

    monkeypatch.setattr(Crew, "warm_start", warm)  # a warm start takes a minute
    made = branch(config, KeptState(0, is_start=True))
    assert warmed == [0]
    made.train(UNEQUAL)
    made.save()
    assert branch(config, KeptState(0, is_start=True)).update == 1
    assert warmed == [0], "the checkpoint has it"


def test_work_whose_removal_was_killed_is_not_continued(
    policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, policy_folder, {}, {})
    trained(config)
    made = branch(config, KeptState(2))

    def killed(folder: Path, *_: object, **_more: object) -> None:
        remove(folder / "checkpoints")
        raise KeyboardInterrupt

    remove = shutil.rmtree
    with monkeypatch.context() as context:
        context.setattr(shutil, "rmtree", killed)  # the process is gone in the middle of it
        with pytest.raises(KeyboardInterrupt):
            made.remove()
    assert retracting.begun(tmp_path / "learner", OWNERS) is None
    assert branch(config, KeptState(2)).update == 2


def test_checkpoints_take_a_tenth_of_the_time_however_large_they_are(policy_folder: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, policy_folder, {}, {})
    trained(config)
    made = branch(config, KeptState(2))
    saved = tmp_path / "learner" / retracting.WORK / "checkpoints"
    for last_save_s, wanted in ((1e9, "000000002"), (0.0, "000000004")):
        made.last_save_s = last_save_s
        made.train(UNEQUAL, save_every_s=1e-6)
        newest = checkpoint.newest(saved)
        assert newest is not None
        assert newest.name == wanted


def test_a_replay_that_does_not_fit_beside_the_learner_is_refused(
    policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_config: Config, *, auditor: bool = False, replay: bool = False) -> None:
        assert (auditor, replay) == (False, True)
        raise ConfigInvalid("The learner does not fit: backward on each card needs 90.0 GiB, and 50.0 GiB are free.")

    monkeypatch.setattr(preflight, "require_fits", refuse)  # the machines of the tests have room
    with pytest.raises(ConfigInvalid, match="needs 90") as refused:
        require_room(config_of(tmp_path, policy_folder, {}, {}))
    assert "Stop the round" in str(refused.value.hint)


KILLED = """
import os, signal, sys, traceback
from pathlib import Path
import torch
from coordinator.learner import checkpoint, retracting
from coordinator.rules.retraction import KeptState
from tests.coordinator.learner.test_retracting import BATCHES, branch, clean, config_of, never_saw_them, trained

torch.set_num_threads(1)
start, top = Path(sys.argv[1]), Path(sys.argv[2])
CHANGES = {"os.link", "os.rename", "os.mkdir", "os.remove", "os.rmdir"}

def forked(work, *words):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work(*words)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def retract(folder, kill_at=0):
    config = config_of(folder, start, {}, {})
    seen = 0

    def count(event, _arguments):
        nonlocal seen
        if event in CHANGES or event == "open" and _arguments[1] and "w" in str(_arguments[1]):
            seen += 1
            if seen == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    begun = retracting.begun(folder / "learner", ("an owner",))
    made = branch(config, begun or KeptState(2))
    while made.update < 6:
        made.train(clean(BATCHES[made.update + 1]), save_every_s=0)
    root = made.finish(folder / f"result-{kill_at}")
    assert checkpoint.read_beside(retracting.result(folder / "learner", root))["before"] == made.before
    (folder / "root").write_text(root)
    (folder / "before").write_text(made.before)
    if not kill_at:
        (folder / "seen").write_text(str(seen))

def prepare():
    trained(config_of(top / "first", start, {}, {}))

assert forked(prepare) == 0
import shutil
shutil.copytree(top / "first", top / "whole")
assert forked(retract, top / "whole") == 0
wanted = (top / "whole/root").read_text()
assert wanted == never_saw_them(config_of(top / "first", start, {}, {})).rooting()()
moments = range(1, int((top / "whole/seen").read_text()) + 1, 9)
for moment in moments:
    folder = top / "killed"
    shutil.copytree(top / "first", folder)
    assert forked(retract, folder, moment) == -signal.SIGKILL, moment
    shutil.rmtree(folder / "learner/checkpoints")  # the learner has newer ones by now
    if retracting.begun(folder / "learner", ("an owner",)) is None:
        shutil.copytree(top / "first/learner/checkpoints", folder / "learner/checkpoints")
    assert forked(retract, folder) == 0, moment
    assert (folder / "root").read_text() == wanted, moment
    assert (folder / "before").read_text() == (top / "whole/before").read_text(), moment
    shutil.rmtree(folder)
print(f"{len(moments)} kills")
"""


@pytest.mark.processes
def test_killed_at_any_change_of_a_file_it_comes_to_the_same_state(policy_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(policy_folder), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[-2]) >= 5, done.stdout


def test_only_rank_0_looks_for_the_checkpoint_to_continue_from(
    policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 may be removing what an earlier retraction left there while another rank starts."""
    looked: list[int] = []

    class Follower(Ranks):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self.rank = rank

    config = config_of(tmp_path, policy_folder, {}, {})
    for rank in (0, 1):
        monkeypatch.setattr(checkpoint, "newest", lambda _, rank=rank: looked.append(rank))
        Crew(config, Follower(rank))
    assert looked == [0]


def test_a_replay_stops_at_a_checkpoint_that_was_just_removed(policy_folder: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, policy_folder, {}, {})
    trained(config)
    kept = checkpoint.newest(tmp_path / "learner" / "checkpoints")
    assert kept is not None
    for number in (1, 99):
        with pytest.raises(Exception, match="was just removed"):
            branch(config, KeptState(number))
    assert retracting.begun(tmp_path / "learner", OWNERS) is None


@pytest.mark.processes
def test_two_ranks_come_to_the_state_of_two_that_never_saw_the_groups(policy_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.coordinator.learner.retracting_ranks", str(policy_folder), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr[-3000:]
    result, wanted, poisoned = done.stdout.split()
    assert result == wanted != poisoned
