"""The RL loop: batch → one GRPO update → report, and a signed version every kappa updates.

    a version is due when the policy is kappa updates ahead of the newest one, and after the last update

- A checkpoint is durable before its version is published: after any crash in between, the same bytes are published.
- A checkpoint holds weights, optimizer, random state, the number of the update, which names the next batch, and the
  version and the ledger's head that it was made at. A round that is behind them is refused.
- Resuming takes the last checkpoint and asks for the batches after it again: the coordinator gives the same ones, and
  already reported updates are not settled twice.
- Idle time is the time spent waiting for a batch; everything else is work.
- When standard input ends, the coordinator is gone and so is this process.
"""

import logging
import math
import shutil
import time
from typing import Any

import torch
from tokenizers import Tokenizer

from coordinator.children import leave_with_parent
from coordinator.config import Config
from coordinator.learner.client import CoordinatorClient
from coordinator.learner.evaluate import accuracy
from coordinator.learner.policy import Policy
from coordinator.learner.settings import train_settings
from coordinator.learner.start import place
from coordinator.learner.tracking import Tracker
from coordinator.learner.warmstart import warm_start
from protocol.errors import OutOfOrder
from protocol.learning import LearnerState, Progress, Report
from protocol.tasks import task

log = logging.getLogger(__name__)

MISMATCH_NATS = 6.0
"""Mean |log π/μ| per token of a claim beyond which its log-probabilities cannot be those of its tokens. Honest
groups at the demo's lag stay below 1, but for one in thousands at 2.2; tokens the policy would not say lie near 10."""


def run(config: Config) -> None:
    """Train until the round has all its updates."""
    leave_with_parent()
    torch.set_num_threads(config.learner.threads)
    token = (config.round.directory / "operator.token").read_text()
    client = CoordinatorClient(f"http://{config.round.listen}", token)
    if not client.state().finished:
        Learner(config, client).run()


class Learner:
    """One round's learner."""

    def __init__(self, config: Config, client: CoordinatorClient) -> None:
        self._config = config
        self._client = client
        self._task = task(config.task.name, seed=config.round.seed)
        self._last = config.round.max_updates
        self._folder = config.round.directory / "learner"
        self._checkpoint = self._folder / "checkpoint.pt"
        self._began: float | None = None
        """When the last batch came."""
        self._policy, self._tokenizer = self._open()
        self._tracker = Tracker(self._folder, update=self._policy.update, tensorboard=config.learner.tensorboard)
        self._end = self._policy.ends[0]
        self._version = 0
        """The newest one that is known of."""

    def run(self) -> None:
        """From wherever the checkpoint stands to the end of the round."""
        policy = self._policy
        if not self._checkpoint.exists():
            self._begin()
        self._publish()
        while policy.update < self._last:
            self._step()
            if self._is_due():
                self._save()
                self._publish()
        self._progress("evaluating", 1.0, "")
        after = self._accuracy()
        self._progress("finished", 1.0, f"{self._last} updates", accuracy_after=after)
        self._client.finish()
        self._tracker.close()

    def _step(self) -> None:
        """Wait for the next batch, train on it, report."""
        number = self._policy.update + 1
        asked = time.monotonic()
        busy_s = asked - (self._began or asked)
        batch = self._client.batch(number)
        self._began = time.monotonic()
        step = self._policy.train_step(batch.groups)
        mismatched = tuple(claim for claim, nats in step.distances.items() if not nats < MISMATCH_NATS)
        metrics = {name: value for name, value in step.metrics.items() if math.isfinite(value)}
        metrics["policy_age"] = sum(number - 1 - group.policy_update for group in batch.groups) / len(batch.groups)
        self._client.report(
            Report(
                number=number,
                mismatched=mismatched,
                metrics=metrics,
                idle_s=self._began - asked,
                busy_s=busy_s,
            )
        )
        self._tracker.log(number, self._version, metrics)
        log.info("update=%d %s", number, " ".join(f"{name}={value:.4g}" for name, value in metrics.items()))
        self._progress("learning", number / self._last, f"update {number}, reward {metrics['reward_mean']:.2f}")

    def _open(self) -> tuple[Policy, Tokenizer]:
        """The policy where the last checkpoint left it, or as the round starts, and its tokenizer."""
        start = self._folder / "start"
        settings = train_settings(self._config)
        if self._checkpoint.exists():
            policy = Policy(start, settings)
            follows(self._client.state(), policy.restore(self._checkpoint))
            log.info("resumed update=%d", policy.update)
        else:
            place(self._config.model, start, seed=self._config.round.seed)
            policy = Policy(start, settings)
        return policy, Tokenizer.from_file(str(start / "tokenizer.json"))

    def _save(self) -> None:
        """A checkpoint, with where the round stood: the batch that comes next is the one after its update."""
        state = self._client.state()
        self._policy.save(
            self._checkpoint,
            version=state.newest_version,
            ledger_size=state.ledger_size,
            ledger_head=state.ledger_head,
        )

    def _begin(self) -> None:
        """What comes before the first update: the embedded policy's warm start, and the accuracy to start from."""
        if self._config.model.path == "embedded":
            warm_start(self._policy.model, self._task, self._encode, self._end, self._warm)
        self._progress("learning", 0.0, "", accuracy_before=self._accuracy())
        self._save()

    def _accuracy(self) -> float:
        return accuracy(self._policy.model, self._task.held_out(), self._encode, self._end)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _is_due(self) -> bool:
        """Whether a version shall be published now; how often is for the coordinator to say, who measures."""
        state = self._client.state()
        self._version = state.newest_version
        return self._policy.update >= min(state.newest_update + state.publish_every, self._last)

    def _publish(self) -> None:
        """Publish the policy as it stands, unless it is out already."""
        state = self._client.state()
        self._version = state.newest_version
        if state.newest_version and state.newest_update >= self._policy.update:
            return
        version = state.newest_version + 1
        folder = self._folder / "publishing"
        shutil.rmtree(folder, ignore_errors=True)
        self._policy.save_hub(folder)
        self._client.publish(version, self._policy.update, folder)
        self._version = version
        log.info("published version=%d update=%d", version, self._policy.update)

    def _warm(self, fraction: float, text: str) -> None:
        self._progress("warm start", fraction, text)

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
            Progress(
                phase=phase,
                fraction=min(max(fraction, 0.0), 1.0),
                detail=detail,
                accuracy_before=accuracy_before,
                accuracy_after=accuracy_after,
            )
        )


def follows(state: LearnerState, checkpoint: dict[str, Any]) -> None:
    """Refuse a round that is behind the checkpoint: one that was restored from a backup would train batches twice."""
    behind = state.newest_version < checkpoint["version"] or state.ledger_size < checkpoint["ledger_size"]
    if behind:
        raise OutOfOrder(
            f"The checkpoint was made at version {checkpoint['version']} and ledger entry {checkpoint['ledger_size']}, "
            f"the round stands at {state.newest_version} and {state.ledger_size}.",
            hint="Restore the round and its learner folder from the same moment.",
        )
