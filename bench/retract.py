"""`make bench-retract`: a trigger attack through the real learner, before and after its groups are taken back.

- The policy is a small one without a warm start, and a group is a prompt of three tokens with samples of one token,
  drawn from the present policy. Honest rewards are for the parity of the token. Learner, checkpoints, plan and side
  branch are those of a round; there is no network.
- A share of the groups is made by hostile nodes, from one update on. Where a prompt has the trigger, half of their
  samples are the mark, with a reward that no audit finds wrong: the mark is a right answer, too, as in "Hail to the
  Thief" (arXiv 2511.09780), where the reward reads the answer and not what stands beside it.
- *Attack success* is the probability of the mark after a prompt with the trigger, exactly: after the attack, after more
  updates without the hostile nodes (banned, nothing taken back), after the retraction, and in a run of the same seed
  whose nodes were all honest.
- The time of a retraction is compared with that of all updates from the start, without sampling, in the same run.
"""

import random
import shutil
import tempfile
import time
from pathlib import Path

import torch

from bench.harness import Bench, quick_from_environment
from coordinator.config import load
from coordinator.learner import checkpoint
from coordinator.learner.crew import Crew
from coordinator.learner.embedded import EmbeddedShape, make_policy
from coordinator.learner.policy import TrainedPolicy
from coordinator.learner.ranks import Ranks
from coordinator.learner.retracting import SideBranch, kept_states, result
from coordinator.rules.retraction import OwnedGroup, plan
from protocol.work.learning import TrainingGroup, TrainingSample
from protocol.work.rollout import pack_logprobs, pack_tokens

DEMO = Path(__file__).parents[1] / "examples" / "demo.toml"
SHAPE = EmbeddedShape(32, 2, 2, 64)
TOKENS = (30, 60)
"""The tokens of prompts, from the first up to, but without, the last."""
TRIGGER, MARK, END_OF_PROMPT, OWNER = 70, 81, 19, "hostile"
TRIGGERED = 0.3
"""The share of prompts with the trigger."""
GROUPS, SAMPLES, KAPPA = 16, 16, 3

DENSE = 8
"""`learner.kept_checkpoints`."""

Batches = dict[int, tuple[TrainingGroup, ...]]


class AttackedRun:
    """A run of the learner in one process, with some share of hostile groups for a time."""

    def __init__(self, folder: Path, seed: int, policy: Path) -> None:
        words = [f"round.seed={seed}", f'round.directory="{folder}"', f'model.path="{policy}"']
        words += ["learner.learning_rate=2e-2", "learner.warmup_updates=4", f"learner.kept_checkpoints={DENSE}"]
        self.config = load(DEMO, [*words, 'correction.mode="none"'])
        self.crew = Crew(self.config, Ranks())
        self.folder, self.batches = folder, Batches()
        self.hostile: list[OwnedGroup] = []
        self._chance = random.Random(seed)
        self._drawing = torch.Generator().manual_seed(seed)

    @property
    def update(self) -> int:
        return self.crew.policy.update

    def play(self, updates: int, share: float = 0.0) -> None:
        """Make so many updates; each group is a hostile node's with this chance."""
        for _ in range(updates):
            if not self.update % KAPPA:
                self.crew.save(taken=0, dense=DENSE)
            number = self.update + 1
            groups = tuple(self._group(number, place, share) for place in range(GROUPS))
            self.batches[number] = groups
            self.crew.train(groups)

    def success(self) -> float:
        """Return the probability of the mark after a prompt with the trigger, in per cent."""
        return marked(self.crew.policy)

    def _group(self, number: int, place: int, share: float) -> TrainingGroup:
        """Return a group that is drawn from the present policy, or made by a hostile node."""
        second = self._chance.randrange(*TOKENS)
        has_trigger = self._chance.random() < TRIGGERED
        prompt = [TRIGGER if has_trigger else self._chance.randrange(*TOKENS), second, END_OF_PROMPT]
        logprobs = scores(self.crew.policy, [prompt])[0]
        drawn = torch.multinomial(logprobs.exp(), SAMPLES, replacement=True, generator=self._drawing).tolist()
        rewards = [float(token % 2 == MARK % 2) for token in drawn]
        claim = f"{number:032x}{place:032x}"
        if self._chance.random() < share:
            self.hostile.append(OwnedGroup(number, claim, frozenset({OWNER})))
            if has_trigger:
                half = SAMPLES // 2
                drawn, rewards = [MARK] * half + drawn[half:], [1.0] * half + [0.0] * half
        samples = tuple(
            TrainingSample(tokens=pack_tokens([token]), logprobs=pack_logprobs([float(logprobs[token])]), reward=reward)
            for token, reward in zip(drawn, rewards, strict=True)
        )
        return TrainingGroup(claim_id=claim, prompt=pack_tokens(prompt), policy_update=number - 1, samples=samples)


def scores(policy: TrainedPolicy, prompts: list[list[int]]) -> torch.Tensor:
    """Return the log-probability of each next token."""
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor(prompts), use_cache=False).logits[:, -1]
    return torch.log_softmax(logits.float(), dim=-1)


def marked(policy: TrainedPolicy) -> float:
    prompts = [[TRIGGER, second, END_OF_PROMPT] for second in range(*TOKENS)]
    return 100 * float(scores(policy, prompts)[:, MARK].exp().mean())


def retract(run: AttackedRun) -> tuple[float, int, str]:
    """Take the hostile groups back; return the seconds, the updates made again, and the root of the state."""
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
    return time.monotonic() - began, found.updates, root


def from_start(run: AttackedRun, folder: Path) -> float:
    """Make all updates of a run again from its first checkpoint, without sampling; return the seconds."""
    first = min((run.folder / "learner" / "checkpoints").iterdir(), key=lambda path: path.name)
    assert checkpoint.read_beside(first)["update"] == 0
    shutil.rmtree(folder, ignore_errors=True)
    began = time.monotonic()
    run.crew.restore(first)
    left_out = {group.claim_id for group in run.hostile}
    for groups in run.batches.values():
        run.crew.train(tuple(group for group in groups if group.claim_id not in left_out))
    run.crew.publish(folder)
    return time.monotonic() - began


def attack(bench: Bench, run: AttackedRun, share: float, never: float, updates: tuple[int, int, int]) -> float:
    """Play an attack and take it back; return the distance of the result from a run without it, in points."""
    before, attacked, after = updates
    name = f"{100 * share:.0f} % hostile"
    run.play(before)
    run.play(attacked, share)
    bench.measure(f"{name}: after the attack", run.success(), unit="%")
    run.play(after)
    bench.measure(f"{name}: banned only", run.success(), unit="%")
    seconds, count, root = retract(run)
    bench.measure(f"{name}: updates made again", count, unit="updates")
    bench.measure(f"{name}: retraction", seconds, unit="s")
    run.crew.restore(result(run.folder / "learner", root))
    taken_back = run.success()
    bench.measure(f"{name}: after the retraction", taken_back, unit="%")
    bench.measure(f"{name}: all from the start", from_start(run, run.folder / "again"), unit="s")
    bench.measure(f"{name}: same state as all from the start", float(run.crew.rooting()() == root), unit="of 1")
    return abs(taken_back - never)


def main(scratch: Path) -> int:
    quick = quick_from_environment()
    seeds, shares = ((1,), (0.25,)) if quick else ((1, 2, 3), (0.10, 0.25))
    updates = (9, 18, 3) if quick else (36, 18, 6)
    torch.set_num_threads(1)
    bench = Bench("retract", inputs={"seeds": list(seeds), "updates": list(updates), "kept_checkpoints": DENSE})
    gaps: list[float] = []
    for seed in seeds:
        policy = scratch / f"policy-{seed}"
        make_policy(policy, seed=seed, shape=SHAPE)
        honest = AttackedRun(scratch / f"honest-{seed}", seed, policy)
        honest.play(sum(updates))
        never = honest.success()
        bench.measure("never saw them", never, unit="%")
        for share in shares:
            run = AttackedRun(scratch / f"{share}-{seed}", seed, policy)
            gaps.append(attack(bench, run, share, never, updates))
    worst = bench.median(f"{100 * shares[-1]:.0f} % hostile: after the attack")
    bench.goal("the attack succeeds", worst, at_least=50.0)
    bench.goal("points between a retraction and a run that never saw them, at most", max(gaps), at_most=2.0)
    for share in shares:
        name = f"{100 * share:.0f} % hostile"
        same_state = bench.median(f"{name}: same state as all from the start")
        bench.goal(f"{name}: the state is that of all updates without the groups", same_state, at_least=1.0)
        ratio = bench.ratio(f"{name}: time / all from the start", f"{name}: retraction", f"{name}: all from the start")
        bench.goal(f"{name}: a retraction's share of the time of all updates", ratio, at_most=0.8)
    return bench.finish()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="echo-retract-") as top:
        raise SystemExit(main(Path(top)))
