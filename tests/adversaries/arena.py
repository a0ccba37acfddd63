"""The arena: a round at the shipped settings, in which whoever takes part plays by turns.

- Effects are called in place of requests; everything from the lease to the ledger is what runs in a coordinator.
- Time moves by turns. In each, every node asks for work and does it, the learner takes what batches there are, and the
  auditor judges all that was drawn.
- Every third update publishes a version. Its weights come from a learner, if the arena has one; else they are the next
  of a ring, and batches are taken without training.
- The learner's own suspicion is left out: what is noticed here was noticed by intake or replay.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import sqlalchemy as sa
from tokenizers import Tokenizer

from coordinator.audit.auditor import FINDINGS
from coordinator.audit.case import opened
from coordinator.audit.check import ExactReplay, audit
from coordinator.audit.exact_scorer import ExactScorer
from coordinator.audit.scorer import VersionScorer
from coordinator.config import Config
from coordinator.rules.calibration import SHIPPED, read
from coordinator.rules.replay import Prefill, Scored
from coordinator.store import tables
from coordinator.store.facts import FINISHED, set_fact
from coordinator.tasks.task_text import TaskText
from coordinator.transactions import audits
from coordinator.transactions.claims import Judge
from coordinator.transactions.offers import PromptDraw
from ledger.tables import claims_table
from protocol import limits
from protocol.policy.manifest import Sampler
from protocol.tasks import Problem, task
from protocol.work.auditing import AuditCase, CaseFile, Cases, Judged
from protocol.work.learning import TrainingBatch
from protocol.work.lease import Lease, float_class, is_exact
from protocol.work.rollout import Sample, pack_logprobs, pack_tokens, unpack_tokens
from swarm_node.engine.messages import GroupDone, SampleRequest
from swarm_node.engine.torch.engine import TorchEngine
from tests.adversaries.nodes import Node
from tests.coordinator.audit.claims import on_round
from tests.coordinator.world import ROUND, World

SHIPPED_SETTINGS = Config()

TURN_MS = 1_000
CLASS = "torch/bf16/cpu"
"""The class that nodes claim to compute with: the loosest that ships, which a liar would name."""
UPDATES_PER_VERSION = SHIPPED_SETTINGS.staleness.kappa


@dataclass(frozen=True)
class Stage:
    """The settings of a round; all others are the defaults."""

    policies: tuple[Path, ...]
    other: Path
    """A policy of the same tokens that is none of the round's."""
    samples: int
    max_new_tokens: int
    tolerance: str = CLASS
    """The class that the round admits; adversaries say that they are of it, too."""
    groups_per_update: int = SHIPPED_SETTINGS.learner.groups_per_update


Train = Callable[[TrainingBatch], Path]
"""Takes a batch in, and gives the folder of the policy that comes of it."""


class Arena:
    """A round with its players."""

    def __init__(self, folder: Path, stage: Stage, *, secret: int = 0, train: Train | None = None) -> None:
        self.stage = stage
        self.policies = list(stage.policies)
        self._train = train
        self.world = _world(folder, stage, secret)
        start = stage.policies[0]
        self.task = task("arithmetic")
        self._tokenizer = Tokenizer.from_file(str(start / "tokenizer.json"))
        self.text = TaskText(lambda name: (start / name).read_bytes(), self.task, stage.max_new_tokens)
        world = self.world
        world.judge = Judge(ROUND, world.terms, self.text.bounds, self.text.reward, world.audits)
        world.draw = PromptDraw(prompt=self.text.prompt, lease_id=world.draw.lease_id, seed=world.draw.seed)
        self.version, self.update = 1, 0
        world.publish(1, 0)
        self.nodes: list[Node] = []
        self._tolerances = on_round(read(SHIPPED), ROUND)  # which were measured on such a policy

    def enter(self, make: Callable[["Arena", int], Node]) -> Node:
        """Let a node take part."""
        node = make(self, len(self.nodes) + 1)
        self.nodes.append(node)
        return node

    def play(self, turns: int, until: Callable[[], bool] = lambda: False) -> None:
        """Play so many turns, or until something has come about."""
        for _ in range(turns):
            if until():
                return
            self.turn()

    def turn(self) -> None:
        self.world.now_ms += TURN_MS
        work = [(node, lease) for node in self.nodes for lease in node.ask()]
        said = self._sampled(work)
        for node, lease in work:
            node.work(lease, said[lease.lease_id])
        self._learn()
        self.audit()

    def finish(self) -> None:
        """End the round: everything is audited that was drawn, and settled."""
        self.world.run(set_fact, FINISHED, True)
        self.world.release_leftovers()
        self.audit()
        assert self.world.audit() == []

    def policy(self, version: int) -> Path:
        return self.policies[(version - 1) % len(self.policies)]

    def sample(self, folder: Path, lease: Lease, seed: int | None = None) -> tuple[Sample, ...]:
        """Sample a lease with a node's weights, or its prompt with another seed."""
        return self._generate(folder, [lease if seed is None else lease.model_copy(update={"seed": seed})])[0]

    def prefilled(self, lease: Lease, completions: Sequence[Sequence[int]]) -> tuple[Sample, ...]:
        """Any tokens, with the log-probabilities that the claimed version gives them: the best disguise."""
        arrays = [unpack_tokens(pack_tokens(list(tokens))) for tokens in completions]
        (scored,) = self._score(lease.version, [Prefill(unpack_tokens(lease.prompt), arrays, lease.seed, 1.0)])
        return tuple(
            Sample(
                tokens=pack_tokens(list(tokens)),
                logprobs=pack_logprobs(row.logprobs.clip(max=0.0)),
                finish="stop" if tokens[-1] in self.text.bounds.end_tokens else "length",
            )
            for tokens, row in zip(completions, scored, strict=True)
        )

    def question(self, lease: Lease) -> str:
        text: str = self._tokenizer.decode(unpack_tokens(lease.prompt).tolist())
        return text

    def rewards(self, lease: Lease, samples: Sequence[Sample]) -> list[float]:
        problem = Problem(self.question(lease))
        return [self.text.judge(problem, unpack_tokens(sample.tokens).tolist()).score for sample in samples]

    def audit(self) -> None:
        """Judge all that was drawn."""
        while cases := self._take().cases:
            self._judge(cases[0].lease, cases)

    def _take(self) -> Cases:
        taken: Cases = self.world.run(
            audits.assign_cases,
            "auditor",
            limits.AUDITOR_CASES_AT_ONCE,
            terms=self.world.audits,
            now_ms=self.world.now_ms,
        )
        return taken

    def _judge(self, first: bytes, taken: Sequence[AuditCase]) -> None:
        version = Lease.from_bytes(first).version
        sampler = Sampler(temperature=1.0, max_new_tokens=self.stage.max_new_tokens)
        before = [version - 1] if version > 1 and self.policy(version - 1) != self.policy(version) else []
        cases = [
            opened(
                CaseFile(
                    round_id=ROUND,
                    lease=audited.lease,
                    rollout=audited.rollout,
                    fragments=audited.fragments,
                    sampler=sampler,
                ),
                self.policy(version),
                before,
            )
            for audited in taken
        ]
        own = self.stage.tolerance
        exact = ExactReplay(own, self._score) if is_exact(own) else None
        reports = audit(cases, self._score, self._tolerances, float_class(own), exact)
        judged = tuple(
            Judged(claim_id=case.claim_id, finding=FINDINGS[report.outcome], validator=report.validator, report=b"{}")
            for case, report in zip(cases, reports, strict=True)
        )
        self.world.run(audits.record_verdicts, judged, terms=self.world.audits, now_ms=self.world.now_ms)
        for case, verdict in zip(cases, judged, strict=True):
            self._owner(case.node).hear(verdict.finding)

    def _owner(self, node_id: str) -> Node:
        return next(node for node in self.nodes if node_id in {key.node_id for key in node.keys})

    def _score(self, version: int, claims: Sequence[Prefill]) -> list[list[Scored]]:
        folder = self.policy(version)
        scorer = _exact_scorer(folder) if is_exact(self.stage.tolerance) else _scorer(folder)
        return scorer.score(claims)

    def _learn(self) -> None:
        while (batch := self.world.batch(self.update + 1)) is not None:
            self.update += 1
            trained = self._train(batch) if self._train else None
            self.world.report(self.update)
            if self.update % UPDATES_PER_VERSION == 0:
                self.policies.extend([trained] if trained else [])
                self.version += 1
                self.world.publish(self.version, self.update)

    def _sampled(self, work: Sequence[tuple[Node, Lease]]) -> dict[str, tuple[Sample, ...]]:
        """Sample each lease with the weights of its node; leases with the same weights are one batch."""
        by_weights = defaultdict[Path, list[Lease]](list)
        for node, lease in work:
            if (folder := node.weights(lease)) is not None:
                by_weights[folder].append(lease)
        said: dict[str, tuple[Sample, ...]] = defaultdict(tuple)
        for folder, leases in by_weights.items():
            made = self._generate(folder, leases)
            said.update({lease.lease_id: samples for lease, samples in zip(leases, made, strict=True)})
        return said

    def _generate(self, folder: Path, leases: Sequence[Lease]) -> list[tuple[Sample, ...]]:
        done = dict[str, tuple[Sample, ...]]()

        def keep(group: GroupDone) -> None:
            done[group.request_id] = group.samples

        engine = _engine(folder, "exact" if is_exact(self.stage.tolerance) else "float32")
        engine.generate([self._request(place, lease) for place, lease in enumerate(leases)], keep)
        return [done[str(place)] for place in range(len(leases))]

    def _request(self, place: int, lease: Lease) -> SampleRequest:
        return SampleRequest(
            request_id=str(place),
            version=0,
            prompt=lease.prompt,
            seed=lease.seed,
            samples=lease.samples,
            max_new_tokens=self.stage.max_new_tokens,
            temperature=1.0,
            prefixes=lease.prefixes,
        )


def claims_of(arena: Arena, node: Node) -> set[str]:
    """The accepted claims of a node."""
    keys = [key.node_id for key in node.keys]
    query = sa.select(tables.rollouts.c.claim_id).where(tables.rollouts.c.node_id.in_(keys))
    return set(arena.world.run(lambda conn: conn.execute(query).scalars().all()))


@cache
def _engine(folder: Path, dtype: str) -> TorchEngine:
    engine = TorchEngine(dtype=dtype)
    engine.load(folder, 0)
    return engine


@cache
def _scorer(folder: Path) -> VersionScorer:
    return VersionScorer(folder, threads=1)


@cache
def _exact_scorer(folder: Path) -> ExactScorer:
    return ExactScorer(folder, threads=1)


def money(arena: Arena, node: Node) -> dict[str, tuple[str, int]]:
    """Return the outcome of each of a node's claims by lease: its state in the book, and its amount."""
    claims, outcomes = claims_table, dict[str, tuple[str, int]]()
    for table in (tables.rollouts, tables.parts):
        query = (
            sa.select(table.c.lease_id, claims.c.state, table.c.credit_micros)
            .join_from(table, claims, claims.c.claim_id == table.c.claim_id)
            .where(table.c.node_id.in_([key.node_id for key in node.keys]))
        )
        rows = arena.world.run(lambda conn, query=query: conn.execute(query).all())
        outcomes.update({lease_id: (state, int(micros)) for lease_id, state, micros in rows})
    return outcomes


def _world(folder: Path, stage: Stage, secret: int) -> World:
    settings = SHIPPED_SETTINGS
    world = World(
        folder,
        staleness=settings.staleness.max_updates,
        size=stage.groups_per_update,
        budget_micros=settings.market.budget_micros,
        groups_per_request=settings.leases.groups_per_request,
        newcomer_leases=settings.leases.newcomer_leases,
        over_issue=settings.leases.over_issue,
        rules=settings.audit,
        epoch_groups=settings.audit.epoch_groups,
        master=secret.to_bytes(32),
    )
    world.terms = replace(
        world.terms,
        samples_per_group=stage.samples,
        max_new_tokens=stage.max_new_tokens,
        timeout_ms=int(1000 * settings.leases.lease_s(settings.sampling.max_new_tokens)),
        max_owner_share=settings.audit.max_owner_share,
        classes=(stage.tolerance,),
        audit_backlog_max=settings.audit.backlog_max,
    )
    return world
