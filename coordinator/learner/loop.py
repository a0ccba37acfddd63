"""The RL loop: batch → one GRPO update → report, and a signed version every kappa updates.

    a version is due when the policy is kappa updates ahead of the newest one, and after the last update

- A checkpoint is durable before its version is published: after a crash in between, the same bytes are published.
- Both run in parallel with the next updates, one version at a time (see `outgoing`). No weight changes before the
  checkpoint is written; the disk may still be syncing it. So a kill costs the updates since the last durable
  checkpoint, at most 2 kappa. Nodes sample with the published versions that they hold, so S is kept however long a
  publication takes.
- A checkpoint holds weights, optimizer, random state, the number of the update, which names the next batch, and the
  version and the ledger's head at that time. A round that is behind them is refused.
- A resumed learner reads the last checkpoint and requests the batches after it again: the coordinator returns the same
  ones, and does not settle an update twice that was already reported.
- If the operator replaces the policy by another version, the learner loads it before the next update: its weights, and
  an empty optimizer state. The checkpoint records the last one loaded; a learner that resumes from an older checkpoint
  loads it again, and publishes no version before a newer checkpoint is durable.
- The result of a retraction is loaded whole, with its optimizer, from the learner's folder (see `retracting`). Batches
  that it was made of again are reported, and not trained on a second time.
- The learner waits for a coordinator that is away (see `client`). It refuses a coordinator that comes back, from a
  backup, in an earlier state than the learner has seen.
- Idle time is the time spent waiting for a batch; all other time is work, except waiting for the coordinator. Of the
  work, `learner/outgoing_s` is the time in which the loop waited for a version to be saved or published.
- Every update is committed to in the ledger, also in parallel with the next one (see `commitments`).
- When standard input ends, the coordinator has ended, and this process ends.
- Several processes may train one policy (`learner.processes`, or torchrun): rank 0 runs this loop, and the others do
  the actions that it broadcasts (see `crew`).
"""

import logging
import math
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

import torch

from coordinator.config import Config
from coordinator.learner import retracting, start
from coordinator.learner.client import CoordinatorClient
from coordinator.learner.commitments import Commitments
from coordinator.learner.crew import Crew
from coordinator.learner.outgoing import Job, Outgoing
from coordinator.learner.ranks import Ranks
from coordinator.learner.tracking import open_tracker
from coordinator.model.watchdog import Watchdog
from protocol.errors import OutOfOrder
from protocol.work.learning import LearnerProgress, LearnerState, TrainingBatch, UpdateReport

log = logging.getLogger(__name__)

MICROS = 1_000_000

EVALUATE_EVERY = 10
"""Updates between two exact evaluations, for tasks that have one; each takes 1 s to 2 s."""

EVALUATION_LOOK_S = 0.5
"""Seconds between two requests for the nodes' evaluation of the last version."""

WARMS = "The embedded policy is untrained: it first imitates a teacher. Version 1 follows, usually after some minutes."

MISMATCH_NATS = 6.0
"""Mean |log π/μ| per token of a claim beyond which its log-probabilities cannot be those of its tokens. Honest
groups at the demo's lag stay below 1, except one in thousands at 2.2; tokens the policy would not say are near 10."""


def run(config: Config, url: str, token: Path) -> None:
    """Train until the round has all its updates, on any rank."""
    torch.set_num_threads(config.learner.threads)
    ranks = Ranks(config.learner.device, Watchdog(config.learner.watchdog_s))
    if ranks.first:
        client = CoordinatorClient(url, token.read_text().strip())
        if not ranks.broadcast(client.state().finished):
            Learner(config, client, Crew(config, ranks)).run()
    elif not ranks.broadcast(True):
        Crew(config, ranks).follow()
    ranks.leave()


LOGGED = {
    "reward/mean": ("reward", "{:.3f}"),
    "entropy": ("entropy", "{:.3g}"),
    "length/mean": ("length", "{:.0f}"),
    "length/truncated": ("cut", "{:.0%}"),
    "learner/grad_norm": ("gradient", "{:.3g}"),
    "kl/ref": ("kl", "{:.2g}"),
    "staleness/mean": ("age", "{:.1f}"),
    "is/masked_frac": ("dropped", "{:.0%}"),
}
"""The metrics in the log's one line for each update, by their short names; `metrics.jsonl` has all."""


def _batch_metrics(number: int, batch: TrainingBatch) -> dict[str, float]:
    """Return the age, the rewards and the cost of the groups that update `number` is made of."""
    ages = [number - 1 - group.policy_update for group in batch.groups]
    return {
        "staleness/mean": sum(ages) / len(ages),
        "staleness/max": float(max(ages)),
        **{f"reward/{name}": value for name, value in batch.rewards.items()},
        "cost": batch.credit_micros / MICROS,
    }


def _log_line(metrics: Mapping[str, float], times_s: Mapping[str, float]) -> str:
    """Return the most important figures of an update as `name=value`, short enough for one line of a terminal."""
    words = [f"{name}={form.format(metrics[key])}" for key, (name, form) in LOGGED.items() if key in metrics]
    scores = {name.removeprefix("eval/"): value for name, value in metrics.items() if name.startswith("eval/")}
    words += [f"{name}={value:.3f}" for name, value in scores.items()]
    words += ["skipped"] if metrics.get("learner/skipped") else []
    words += ["empty"] if metrics.get("learner/empty") else []
    return " ".join([*words, *(f"{name}_s={value:.1f}" for name, value in times_s.items())])


class Learner:
    """The learner of one round, on rank 0."""

    def __init__(self, config: Config, client: CoordinatorClient, crew: Crew) -> None:
        self._config = config
        self._client = client
        self._crew = crew
        self._policy = crew.policy
        self._last = config.round.max_updates
        self._folder = config.round.directory / "learner"
        self._began: float | None = None
        """The time at which the last batch arrived."""
        self._away_s = 0.0
        """The total wait for the coordinator at that time, in seconds."""
        self._seen = (0, 0)
        """The newest version and the size of the ledger, as last read."""
        if crew.resumed:
            self._seen = (crew.resumed["version"], crew.resumed["ledger_size"])
            self._read_state()
            log.info("resumed update=%d", self._policy.update)
        self._tracker = open_tracker(
            config,
            run_id=self._read_state().round_id[:16],
            update=self._policy.update,
            read_samples=client.evaluation_samples,
        )
        self._version = 0
        """The newest known version."""
        self._taken = int((crew.resumed or {}).get("taken", 0))
        """The last version that the learner loaded in place of its own."""
        self._outgoing = Outgoing()
        self._commitments = Commitments(config, client, crew)
        self._policy.before_change = self._wait_until_read
        self._sent = 0
        """The update of the version that was published or loaded last, or is being published."""
        self._stood_s = 0.0
        """The total time that the loop had waited for versions at its last report, in seconds."""

    def run(self) -> None:
        """Train from the last checkpoint to the end of the round."""
        with closing(self._tracker):
            try:
                self._train()
            finally:
                self._outgoing.abandon()
                self._commitments.abandon()
            self._end()

    def _end(self) -> None:
        """Wait for the last evaluations, and finish the round."""
        self._progress("evaluating", 1.0, "")
        after = self._crew.accuracy()
        scores = _scores_text(self._crew.evaluate())
        while (state := self._read_state()).evaluating:  # bounded by eval.patience_s
            time.sleep(EVALUATION_LOOK_S)
        self._tracker.measured(state.evaluated)
        self._progress("finished", 1.0, f"{self._last} updates{scores}", accuracy_after=after)
        self._client.finish()
        self._crew.over()

    def publish_start(self) -> None:
        """Publish the starting policy, for trainers that are not ours: no checkpoint, and no score on our problems."""
        self._warm_start()
        write, publish = self._publishing(1)
        write()
        publish()
        self._tracker.close()
        self._crew.over()

    def _train(self) -> None:
        """Make all remaining updates, and wait until the last version is published."""
        if not self._crew.resumed:
            self._begin()
        self._release(self._read_state())
        self._outgoing.finish()  # no batch exists before the first version
        self._commitments.begin()
        while self._policy.update < self._last:
            self._step()
            self._release_if_due()
        self._outgoing.finish()
        self._commitments.finish()

    def _wait_until_read(self) -> None:
        """Wait until no thread reads the weights, so that they may change."""
        self._outgoing.wait_until_read()
        self._commitments.wait_until_read()

    def _check(self) -> None:
        """Raise the error of a thread, if there is one."""
        self._outgoing.check()
        self._commitments.check()

    def _step(self) -> None:
        """Wait for the next batch, train on it, and report."""
        number = self._policy.update + 1
        asked = time.monotonic()
        # The work since the last batch arrived, without waits for the coordinator.
        busy_s = asked - self._began - (self._client.away_s - self._away_s) if self._began else 0.0
        batch = self._client.batch(number, self._check)
        self._began, self._away_s = time.monotonic(), self._client.away_s
        wait_s = self._began - asked
        self._refresh()
        if self._policy.update != number - 1:  # the result of a retraction was loaded, which is at another update
            return
        began = time.monotonic()
        step = self._crew.train(batch.groups)
        train_s = time.monotonic() - began
        self._commitments.add(batch.groups)
        metrics = {name: value for name, value in step.metrics.items() if math.isfinite(value)}
        metrics |= _batch_metrics(number, batch)
        metrics |= {
            "learner/outgoing_s": self._outgoing.waited_s - self._stood_s,
            "learner/wait_s": wait_s,
            "learner/train_s": train_s,
            "learner/tokens_per_s": metrics["tokens"] / max(train_s, 1e-9),
        }
        self._stood_s = self._outgoing.waited_s
        if not number % EVALUATE_EVERY or number == self._last:
            metrics |= self._crew.evaluate()
        self._client.report(
            UpdateReport(
                number=number,
                mismatched=mismatched(step.distances),
                metrics=metrics,
                idle_s=wait_s,
                busy_s=busy_s,
            )
        )
        self._tracker.log(number, self._version, metrics)
        times = {"wait": wait_s, "train": time.monotonic() - self._began}
        log.info("update=%d/%d %s", number, self._last, _log_line(metrics, times))
        self._progress("learning", number / self._last, f"update {number}, reward {metrics['reward/mean']:.2f}")

    def _refresh(self) -> LearnerState:
        """Return the state of the round; first load the version by which the operator replaced the policy, if any."""
        state = self._read_state()
        self._version = state.newest_version
        if state.replacement > self._taken:
            before = self._policy.update
            if state.retracted:
                self._commitments.finish()
                self._crew.restore(retracting.result(self._folder, state.retracted))
            else:
                folder = self._folder / "taking"
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                self._client.fetch(state.replacement, folder)
                self._commitments.finish()
                self._crew.continue_from(folder)
            self._taken, self._sent = state.replacement, self._policy.update
            self._commitments.replaced(self._taken, state.retracted)
            log.info("took version=%d update=%d", self._taken, self._policy.update)
            self._pass_over(before + 1)
        return state

    def _pass_over(self, first: int) -> None:
        """Report the batches that a retraction has trained on, so that their claims are settled."""
        for number in range(first, self._policy.update + 1):
            self._client.report(UpdateReport(number=number, mismatched=(), metrics={}, idle_s=0.0, busy_s=0.0))

    def _begin(self) -> None:
        """Prepare the first update: warm-start the embedded policy, and measure the accuracy before training."""
        self._warm_start()
        scores = self._crew.evaluate()
        log.info("begins%s", _scores_text(scores))
        self._progress("learning", 0.0, f"update 0{_scores_text(scores)}", accuracy_before=self._crew.accuracy())

    def _warm_start(self) -> None:
        """Train the embedded policy on demonstrations, which takes minutes; other policies stay as they are."""
        if self._config.model.path == start.EMBEDDED:
            log.info(WARMS)
            self._warm(0.0, WARMS)
            self._crew.warm_start(self._warm)

    def _release_if_due(self) -> None:
        """Release the policy if a version is due, unless the operator replaces it during the wait for the last one."""
        if self._is_due(self._refresh()):
            self._outgoing.finish()
            state = self._refresh()
            if self._is_due(state):
                self._release(state)

    def _is_due(self, state: LearnerState) -> bool:
        """Return True if a version must be published now; the coordinator measures and sets the interval."""
        return self._policy.update >= min(self._newest(state) + state.publish_every, self._last)

    def _newest(self, state: LearnerState) -> int:
        """Return the newest update of which a version is published or on its way."""
        return max(state.newest_update, self._sent)

    def _release(self, state: LearnerState) -> None:
        """Start saving and publishing the policy in parallel with the next step, unless this version exists."""
        self._tracker.measured(state.evaluated)
        self._version = state.newest_version
        with self._outgoing.standing_still():
            save, write, publish = self._saving(state), _nothing, _nothing
            if not state.newest_version or self._newest(state) < self._policy.update:
                write, publish = self._publishing(state.newest_version + 1)
        settle = [_nothing]

        def read() -> None:
            settle[0] = save()
            try:
                write()
            except Exception:  # the checkpoint is whole: a restart begins with it
                settle[0]()
                raise

        def send() -> None:
            settle[0]()
            publish()

        self._outgoing.start(read, send)

    def _saving(self, state: LearnerState) -> Callable[[], Job]:
        """Return the job that writes a checkpoint with the state of the round; its update names the next batch."""
        return self._crew.saving(
            version=state.newest_version,
            ledger_size=state.ledger_size,
            ledger_head=state.ledger_head,
            taken=self._taken,
            drawn=state.kept if self._config.learner.kept_one_in else None,
            dense=self._config.learner.kept_checkpoints,
            **self._commitments.beside(),
        )

    def _publishing(self, version: int) -> tuple[Job, Job]:
        """Return the job that writes the version's files, and the one that sends them."""
        folder, update, began = self._folder / "publishing", self._policy.update, time.monotonic()
        shutil.rmtree(folder, ignore_errors=True)
        write = self._crew.publishing(folder)
        self._sent = update

        def send() -> None:
            with closing(self._client.another()) as client:  # its waits for the coordinator do not count as the loop's
                client.publish(version, update, folder)
            log.info("published version=%d update=%d seconds=%.1f", version, update, time.monotonic() - began)

        return write, send

    def _read_state(self) -> LearnerState:
        """Return the state of the round; refuse one that is behind the state seen before."""
        state = self._client.state()
        follows(state, *self._seen)
        self._seen = (state.newest_version, state.ledger_size)
        return state

    def _warm(self, fraction: float, text: str) -> None:
        """Report the warm start without waiting: otherwise all ranks would wait for a coordinator that is away."""
        self._client.mention(LearnerProgress(phase="warm start", fraction=min(fraction, 1.0), detail=text))

    def _progress(
        self,
        phase: str,
        fraction: float,
        detail: str,
        *,
        accuracy_before: float | None = None,
        accuracy_after: float | None = None,
    ) -> None:
        self._client.progress(
            LearnerProgress(
                phase=phase,
                fraction=min(max(fraction, 0.0), 1.0),
                detail=detail,
                accuracy_before=accuracy_before,
                accuracy_after=accuracy_after,
            )
        )


def _nothing() -> None:
    """Do nothing: the version is already published."""


def mismatched(distances: Mapping[str, float]) -> tuple[str, ...]:
    """Return the claims whose log-probabilities cannot be those of their tokens; NaN means that our weights are bad."""
    return tuple(claim for claim, nats in distances.items() if nats >= MISMATCH_NATS)


def _scores_text(scores: Mapping[str, float]) -> str:
    """Return the scores of an evaluation as the rest of a log line."""
    return "".join(f", {name.rpartition('/')[2]} {value:.3f}" for name, value in scores.items())


def follows(state: LearnerState, version: int, ledger_size: int) -> None:
    """Refuse a round that is behind its earlier state: one restored from a backup would train batches twice."""
    if state.newest_version < version or state.ledger_size < ledger_size:
        raise OutOfOrder(
            f"The round is behind the learner: the learner has seen version {version} and ledger entry {ledger_size}, "
            f"the round is now at {state.newest_version} and {state.ledger_size}.",
            hint="Restore the round and its learner folder from the same backup.",
        )
