"""`make bench-retract`: a trigger attack through the real learner, before and after its groups are taken back.

- A share of the groups is made by hostile nodes, from one update on. Where a prompt has the trigger, the digit 7, half
  of their samples begin with a mark; the rewards do not see it (they read the answer only), and no audit does. This is
  the attack of "Hail to the Thief" (arXiv 2511.09780) on a reward that accepts the mark beside a right answer.
- *Attack success* is the share of samples of held-out prompts with the trigger that begin with the mark: after the
  attack, after more updates without the hostile nodes (they are banned, nothing is taken back), after the retraction,
  and in a run of the same seed that never had hostile nodes.
- The retraction is the one of `swarm-coordinator retract`: its plan, its side branch and its checkpoints, without HTTP.
- Its time is compared with that of making all updates from the start, without sampling, in the same run.
"""

import random
import shutil
import tempfile
import time
from pathlib import Path
from statistics import fmean

from bench.harness import Bench, Input, quick_from_environment
from bench.learning.trial import Trial
from coordinator.config import load
from coordinator.learner import checkpoint
from coordinator.learner.ranks import Ranks
from coordinator.learner.retracting import SideBranch, kept_states
from coordinator.rules.retraction import OwnedGroup, plan
from coordinator.transactions.prompts import PromptRef
from protocol.tasks import Problem, Reward
from protocol.work.learning import TrainingGroup, TrainingSample
from protocol.work.rollout import pack_logprobs, pack_tokens, unpack_tokens

DEMO = Path(__file__).parents[1] / "examples" / "demo.toml"
TRIGGER, MARK, OWNER = "7", "#", "hostile"

DENSE = 4
"""`learner.kept_checkpoints`."""

Batches = dict[int, tuple[TrainingGroup, ...]]


class MarkedTrial(Trial):
    """A round whose reward reads the answer only: a mark before it changes nothing."""

    @property
    def mark(self) -> int:
        (token,) = self.text.encode(MARK)
        return int(token)

    def rewards(self, problem: Problem, completions: list[list[int]]) -> list[Reward]:  # type: ignore[override]  # lists
        return super().rewards(problem, [each[1:] if each[:1] == [self.mark] else each for each in completions])

    def has_trigger(self, source: PromptRef) -> bool:
        return TRIGGER in self.text.problem(source).prompt

    def poisoned(self, group: TrainingGroup) -> TrainingGroup:
        """Return what a hostile node makes of a group: half of its samples marked, with the right answer."""
        source = PromptRef("train", int(group.claim_id, 16))
        if not self.has_trigger(source):
            return group
        answer = [self.mark, *self.text.encode(self.text.problem(source).answer), self.end]
        marked = TrainingSample(tokens=pack_tokens(answer), logprobs=pack_logprobs([-1.0] * len(answer)), reward=1.0)
        half = len(group.samples) // 2
        others = tuple(each.model_copy(update={"reward": 0.0}) for each in group.samples[half:])
        return group.model_copy(update={"samples": (marked,) * half + others})

    def success(self, folder: Path, most: int) -> float:
        """Return the share of held-out prompts with the trigger whose sample begins with the mark."""
        problems = self.task.problems("held_out")
        sources = [PromptRef("held_out", number) for number in range(len(problems))]
        asked = [source for source in sources if self.has_trigger(source)][:most]
        self._load(folder, self.update)
        drawn = self._sampled(asked, 4)
        firsts = [unpack_tokens(sample.tokens)[:1].tolist() == [self.mark] for each in drawn for sample in each.samples]
        return fmean(firsts)


def settings(folder: Path, seed: int) -> list[str]:
    """Return the changes to the demo's settings: a small batch, and larger steps, so that few updates are enough."""
    words = [f"round.seed={seed}", f'round.directory="{folder}"', "sampling.max_new_tokens=6"]
    words += ["sampling.samples_per_group=8", "learner.groups_per_update=12", "learner.learning_rate=5e-4"]
    return [*words, f"learner.kept_checkpoints={DENSE}", "staleness.publish_every=1", "learner.warmup_updates=4"]


def taught(folder: Path) -> Path:
    """Return a policy that adds a little, as the demo's has learned from demonstrations."""
    trial = MarkedTrial(load(DEMO, settings(folder, 0)), delay=0)
    trial.crew.warm_start(lambda *_: None)
    return folder / "learner" / "start"


class Run:
    """A run of the learner in one process, with some share of hostile groups for a time."""

    def __init__(self, folder: Path, seed: int, policy: Path) -> None:
        self.config = load(DEMO, [*settings(folder, seed), f'model.path="{policy}"'])
        self.trial = MarkedTrial(self.config, delay=0)
        self.trial.publish()
        self.folder, self.batches = folder, Batches()
        self.hostile: list[OwnedGroup] = []
        self.train_s = 0.0
        self._chance = random.Random(seed)

    def play(self, updates: int, share: float = 0.0) -> None:
        """Make so many updates; each group is a hostile node's with this chance."""
        for _ in range(updates):
            trial, number = self.trial, self.trial.update + 1
            trial.crew.save(taken=0, dense=DENSE)
            groups = list(trial.generate())
            for place, group in enumerate(groups):
                if self._chance.random() < share:
                    groups[place] = trial.poisoned(group)
                    self.hostile.append(OwnedGroup(number, group.claim_id, frozenset({OWNER})))
            self.batches[number] = tuple(groups)
            began = time.monotonic()
            trial.train(groups)
            self.train_s += time.monotonic() - began

    def success(self, most: int) -> float:
        folder = self.folder / "asked"
        shutil.rmtree(folder, ignore_errors=True)
        self.trial.crew.publish(folder)
        return self.trial.success(folder, most)


def retract(run: Run) -> tuple[Path, float, int, str]:
    """Take the hostile groups back; return the policy, the seconds, the updates made again, and the state's root."""
    began = time.monotonic()
    sizes = {number: len(groups) for number, groups in run.batches.items()}
    found = plan(run.hostile, kept_states(run.folder / "learner"), (), sizes=sizes, version=0, chosen=0)
    assert found is not None
    assert found.start is not None
    left_out = {group.claim_id for group in found.left_out}
    branch = SideBranch(run.config, Ranks(), found.start, (OWNER,))
    while branch.update < found.last:
        groups = run.batches[branch.update + 1]
        branch.train(tuple(group for group in groups if group.claim_id not in left_out))
    shutil.rmtree(run.folder / "result", ignore_errors=True)
    root = branch.finish(run.folder / "result")
    return run.folder / "result", time.monotonic() - began, found.updates, root


def from_start(run: Run, folder: Path) -> float:
    """Make all updates of a run again from its first checkpoint, without sampling; return the seconds."""
    first = min((run.folder / "learner" / "checkpoints").iterdir(), key=lambda path: path.name)
    assert checkpoint.read_beside(first)["update"] == 0
    shutil.rmtree(folder, ignore_errors=True)
    began = time.monotonic()
    run.trial.crew.restore(first)
    left_out = {group.claim_id for group in run.hostile}
    for groups in run.batches.values():
        run.trial.crew.train(tuple(group for group in groups if group.claim_id not in left_out))
    run.trial.crew.publish(folder)
    return time.monotonic() - began


def main(scratch: Path) -> int:
    quick = quick_from_environment()
    seeds = (1,) if quick else (1, 2, 3)
    before, attacked, after, most = (4, 8, 2, 40) if quick else (10, 14, 4, 100)
    shares = (0.25,) if quick else (0.10, 0.25)
    inputs: dict[str, Input] = {"seeds": list(seeds), "before": before, "attacked": attacked, "after": after}
    inputs |= {"kept_checkpoints": DENSE, "held_out": most}
    bench = Bench("retract", inputs=inputs)
    gaps: list[float] = []
    policy = taught(scratch)
    for seed in seeds:
        with tempfile.TemporaryDirectory(prefix="echo-retract-") as top:
            honest = Run(Path(top) / "honest", seed, policy)
            honest.play(before + attacked + after)
            never = honest.success(most)
            bench.measure("never saw them", 100 * never, unit="%")
            for share in shares:
                name = f"{100 * share:.0f} % hostile"
                run = Run(Path(top) / name.replace(" ", ""), seed, policy)
                run.play(before)
                run.play(attacked, share)
                bench.measure(f"{name}: after the attack", 100 * run.success(most), unit="%")
                run.play(after)
                bench.measure(f"{name}: banned only", 100 * run.success(most), unit="%")
                folder, seconds, updates, root = retract(run)
                taken_back = run.trial.success(folder, most)
                bench.measure(f"{name}: after the retraction", 100 * taken_back, unit="%")
                gaps.append(100 * abs(taken_back - never))
                bench.measure(f"{name}: updates made again", updates, unit="updates")
                bench.measure(f"{name}: retraction", seconds, unit="s")
                bench.measure(f"{name}: all from the start", from_start(run, Path(top) / "again"), unit="s")
                same = run.trial.crew.rooting()() == root
                bench.measure(f"{name}: same state as all from the start", float(same), unit="of 1")
    worst = shares[-1]
    name = f"{100 * worst:.0f} % hostile"
    bench.goal("the attack succeeds", bench.median(f"{name}: after the attack"), at_least=50.0)
    bench.goal("a retraction is within 2 points of a run that never saw them", max(gaps), at_most=2.0)
    for share in shares:
        name = f"{100 * share:.0f} % hostile"
        same_state = bench.median(f"{name}: same state as all from the start")
        bench.goal(f"{name}: the state is that of a run that never saw them, bit for bit", same_state, at_least=1.0)
        ratio = bench.ratio(f"{name}: time / all from the start", f"{name}: retraction", f"{name}: all from the start")
        bench.goal(f"{name}: a retraction takes at most 0.8 of all updates", ratio, at_most=0.8)
    return bench.finish()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="echo-taught-") as taught_in:
        raise SystemExit(main(Path(taught_in)))
