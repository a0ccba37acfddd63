"""`make bench-audit-learner`: what it costs that a learner can be audited, and what an audit of it costs.

- The policy is SmolLM2-135M-Instruct in float32, all weights trained. A batch has random tokens and rewards; learner,
  checkpoints and commitments are those of a round, without its network.
- An update with its commitment is one beside which a thread computes the root of the state before it, as the learner's
  does. It is compared with the same update without, in turns. Both count processor time, too: the thread uses a core
  that the update may not need.
- A replay loads the checkpoint, compares its root, makes one update and computes the root after it.
- What an update adds to the log is the bytes of its two entries; what a kept update costs is its checkpoint and batch.
"""

import random
import tempfile
import time
from pathlib import Path

import torch

from bench.harness import Bench, no_options, quick_from_environment
from coordinator.config import load
from coordinator.learner import checkpoint
from coordinator.learner.commitments import settings_document
from coordinator.learner.crew import Crew
from coordinator.learner.outgoing import Outgoing
from coordinator.learner.ranks import Ranks, machine_here
from ledger.entry import FormedBatch, UpdateEntry
from ledger.training import groups_root
from protocol.policy.chunks import digest
from protocol.work.learning import KeptBatch, TrainingGroup, TrainingSample
from protocol.work.rollout import pack_logprobs, pack_tokens

ROOT = Path(__file__).parents[1]
SMOLLM2 = ROOT / ".venv-real" / "smollm2"
DEMO = ROOT / "examples" / "demo.toml"
TOKENS = (100, 20_000)
"""The tokens of prompts and samples, from the first up to, but without, the last."""


def make_batch(groups: int, samples: int, prompt: int, sample: int) -> tuple[TrainingGroup, ...]:
    """Return groups of random tokens; half of each group's samples are right."""
    chance = random.Random(0)

    def draw(count: int) -> bytes:
        return pack_tokens([chance.randrange(*TOKENS) for _ in range(count)])

    return tuple(
        TrainingGroup(
            claim_id=f"{number:064x}",
            prompt=draw(prompt),
            policy_update=0,
            samples=tuple(
                TrainingSample(tokens=draw(sample), logprobs=pack_logprobs([-5.0] * sample), reward=float(place % 2))
                for place in range(samples)
            ),
        )
        for number in range(groups)
    )


class CommittedRun:
    """A learner's policy, and the thread that computes the roots of its states."""

    def __init__(self, folder: Path) -> None:
        words = [f'round.directory="{folder}"', f'model.path="{SMOLLM2}"', "learner.learning_rate=1e-6"]
        words += ["learner.threads=1", "learner.micro_batch_tokens=2048", 'correction.mode="none"']
        self.config = load(DEMO, words)
        self.folder = folder / "learner"
        self.crew = Crew(self.config, Ranks())
        self.roots: list[str] = []
        self._sending = Outgoing()

    def update(self, groups: tuple[TrainingGroup, ...], *, is_committed: bool) -> tuple[float, float]:
        """Make one update; return its seconds, and those of the processor."""
        policy, sending = self.crew.policy, self._sending
        began, used = time.monotonic(), time.process_time()
        if is_committed:
            compute = self.crew.rooting()
            policy.before_change = sending.wait_until_read
            sending.start(lambda: self.roots.append(compute()), lambda: None)
        self.crew.train(groups)
        sending.finish()
        return time.monotonic() - began, time.process_time() - used


def replay(run: CommittedRun, kept: Path, groups: tuple[TrainingGroup, ...]) -> tuple[float, str]:
    """Make an update again from its checkpoint; return the seconds, and the root of the state after it."""
    began = time.monotonic()
    run.crew.restore(kept)
    assert run.crew.rooting()() == run.roots[-1], "the checkpoint is the state before the update"
    run.crew.train(groups)
    return time.monotonic() - began, run.crew.rooting()()


def entries_bytes(run: CommittedRun, groups: tuple[TrainingGroup, ...]) -> int:
    """Return the bytes of the two entries of an update in the log."""
    number, root = run.crew.policy.update, groups_root(group.to_bytes() for group in groups)
    batch = FormedBatch(number=number, groups=len(groups), groups_root=root)
    update = UpdateEntry(
        update=number,
        attempt=1,
        before=run.roots[0],
        after=run.roots[-1],
        groups_root=root,
        settings_digest=digest(settings_document(run.config, run.folder / "start", [machine_here("cpu")])),
        seed=run.config.round.seed,
        steps=run.crew.policy.steps,
        replaced_by=0,
    )
    return len(batch.body) + len(update.body)


def main(scratch: Path) -> int:
    no_options(__doc__)
    quick = quick_from_environment()
    rounds, groups = (2, make_batch(2, 4, 32, 64)) if quick else (3, make_batch(4, 4, 64, 128))
    torch.set_num_threads(1)
    tokens = sum(len(sample.tokens) // 4 for group in groups for sample in group.samples)
    run = CommittedRun(scratch / "round")
    bench = Bench("audit_learner", inputs={"rounds": rounds, "sampled tokens per update": tokens})
    run.update(groups, is_committed=True)  # the moments of the optimizer are there from now on
    for _ in range(rounds):
        for name, is_committed in (("without", False), ("with its commitment", True)):
            wall, used = run.update(groups, is_committed=is_committed)
            bench.measure(f"an update {name}", wall, unit="s")
            bench.measure(f"an update {name}, processor", used, unit="s")
        began = time.monotonic()
        run.crew.rooting()()
        bench.measure("the root of the state", time.monotonic() - began, unit="s")
    run.crew.save(taken=0)
    kept = checkpoint.newest(run.folder / "checkpoints")
    assert kept is not None
    run.roots.append(run.crew.rooting()())
    for _ in range(rounds):
        run.crew.restore(kept)
        bench.measure("the replayed update", run.update(groups, is_committed=False)[0], unit="s")
        after = run.crew.rooting()()
        seconds, root = replay(run, kept, groups)
        bench.measure("its replay", seconds, unit="s")
        bench.measure("its replay ends in the same state", float(root == after), unit="of 1")
    batch = KeptBatch(number=1, groups=groups, rollouts=())
    bench.measure("log, per update", entries_bytes(run, groups), unit="bytes")
    bench.measure("a kept checkpoint", sum(file.stat().st_size for file in kept.iterdir()) / 2**20, unit="MiB")
    bench.measure("a kept batch", len(batch.to_bytes()) / 2**20, unit="MiB")
    more = bench.ratio("with ÷ without", "an update with its commitment", "an update without")
    bench.goal("an update with its commitment ÷ without", more, at_most=1.01)
    bench.goal("a replay ends in the same state", bench.median("its replay ends in the same state"), at_least=1.0)
    once = bench.ratio("replay ÷ update", "its replay", "the replayed update")
    bench.goal("a replay ÷ its update", once, at_most=1.5)
    return bench.finish()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="echo-audit-learner-") as top:
        raise SystemExit(main(Path(top)))
