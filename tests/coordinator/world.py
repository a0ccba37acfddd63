"""A round's store with everything around it that is not under test: deterministic, on a real SQLite file.

- Time stands still until a test moves `now_ms`; lease ids and seeds count upwards.
- Nothing is audited unless a test says so, or the learner suspects it.
- Tokens mean themselves: an honest completion of group g is `[g + 10, END]`, and the reward is 1 for exactly that.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import sqlalchemy as sa

from coordinator.config import AuditSection
from coordinator.rules.prompt_refs import PromptRef
from coordinator.rules.selection import OFF, SelectionRules
from coordinator.rules.trust import Finding, OwnerStanding
from coordinator.store import tables
from coordinator.store.state import Database, engine
from coordinator.transactions import (
    audits,
    batches,
    checked_rollouts,
    claims,
    escrow,
    leases,
    lottery,
    offers,
    policy_versions,
    registry,
    standings,
)
from coordinator.transactions.claims import Judge
from coordinator.transactions.leases import LeaseTerms
from coordinator.transactions.lottery import AuditTerms
from coordinator.transactions.offers import PromptDraw
from ledger import store
from ledger import tables as ledger_tables
from ledger.accounts import BUDGET, payable, pending
from ledger.entry import Deposit
from ledger.fsck import Difference
from protocol.ids import NodeId
from protocol.policy.chunks import digest
from protocol.policy.manifest import PolicyManifest
from protocol.tasks import Reward
from protocol.wire.signing import NodeKey
from protocol.work.auditing import Cases, Judged
from protocol.work.fragment import Fragment, FragmentPart
from protocol.work.learning import TrainingBatch, UpdateReport
from protocol.work.lease import Lease
from protocol.work.messages import LeaseProgressReply, LeaseReply, LeaseRequest, Register, ReturnLeases, Verdict
from protocol.work.rollout import PolicyBounds, RolloutClaim, Sample, pack_logprobs, pack_tokens, unpack_tokens
from tests.coordinator import one_dialect

one_dialect.register()

ROUND = "a" * 64
END = 1
VOCAB = 10_000
PRICE = 1_000_000
"""Micro-units per million tokens: one micro-unit per token, so that credits can be counted by hand."""

NOW_MS = 1_763_000_000_000
"""A time of this century: what sends one to PostgreSQL as a 32-bit integer fails here as it does in a round."""

SAMPLES, MAX_NEW = 2, 4
MAX_COST = SAMPLES * MAX_NEW
"""Micro-units of the dearest answer to one lease."""

HONEST_TOKENS = 2 * SAMPLES

NO_AUDITS = AuditSection(first_groups=0, floor=0.0, trusted_floor=0.0)


def said(source: PromptRef) -> int:
    """The token that a problem's prompt and its right answer begin with."""
    return source.number + (10 if source.split == "train" else 5_000)


def reward(source: PromptRef, completion: list[int]) -> Reward:
    return Reward(float(completion == [said(source), END]), "ok")


def manifest(version: int, update: int, **change: Any) -> PolicyManifest:
    fields = {
        "round_id": ROUND,
        "version": version,
        "update": update,
        "parent": None,
        "task": "test",
        "sampler": {"temperature": 1.0, "max_new_tokens": MAX_NEW},
        "chunk_size_bytes": 1024,
        "files": [{"path": "f", "size_bytes": 0, "digest": "d" * 64, "chunks": []}],
    }
    return PolicyManifest.from_value(fields | change)


@cache
def empty_store() -> bytes:
    """A store's file with all tables and no rows: making it anew for each test would cost a second of syncing."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "state.db"
        Database(path).close()
        return path.read_bytes()


EMPTY_EVERY_TABLE = """
DO $$ DECLARE name text; BEGIN
  SET LOCAL session_replication_role = replica;
  FOR name IN SELECT quote_ident(tablename) FROM pg_tables
    WHERE schemaname = current_schema() AND tablename NOT IN ('alembic_version', 'ledger_head')
  LOOP EXECUTE 'DELETE FROM ' || name; END LOOP;
  UPDATE ledger_head SET size = 0;
EXCEPTION WHEN undefined_table THEN NULL; END $$
"""
"""Foreign keys are not checked meanwhile, so the order does not matter. TRUNCATE makes new files of each table and
index: 70 ms of the server for each test."""


def clear(postgres_url: str) -> None:
    """Delete every row of a PostgreSQL; the tables stay, since making them takes longer than a test."""
    made = engine(postgres_url)
    with made.connect() as connection:
        connection.exec_driver_sql(EMPTY_EVERY_TABLE)
    made.dispose()


class World:
    """A round; `staleness` is S, `size` is B."""

    def __init__(
        self,
        folder: Path,
        *,
        staleness: int = 2,
        size: int = 2,
        budget_micros: int = 10**6,
        groups_per_request: int = 8,
        budget_micros_per_hour: int = 0,
        newcomer_leases: int = 64,
        over_issue: int = 0,
        buffered_max: int = 0,
        lookahead: int = 0,
        selection: SelectionRules = OFF,
        problems: int = 0,
        rules: AuditSection = NO_AUDITS,
        epoch_groups: int = 256,
        master: bytes = bytes(32),
        postgres_url: str = "",
    ) -> None:
        self.problems = problems
        self.where: Path | str = postgres_url or folder / "state.db"
        if isinstance(self.where, Path):
            self.where.write_bytes(empty_store())
        else:
            clear(self.where)
        self.database = Database(self.where)
        self.now_ms = NOW_MS
        self.terms = LeaseTerms(
            staleness=staleness,
            groups_per_update=size,
            groups_per_request=groups_per_request,
            samples_per_group=SAMPLES,
            max_new_tokens=MAX_NEW,
            timeout_ms=1000,
            newcomer_leases=newcomer_leases,
            over_issue=over_issue,
            budget_micros_per_hour=budget_micros_per_hour,
            buffered_max=buffered_max,
            lookahead=lookahead,
            selection=selection,
        )
        self.audits = AuditTerms(master, rules.model_copy(update={"epoch_groups": epoch_groups}))
        self.judge = Judge(ROUND, self.terms, PolicyBounds(VOCAB, frozenset({END}), MAX_NEW), self.reward, self.audits)
        self._numbers = count(1)
        self.draw = PromptDraw(
            prompt=lambda source: [said(self.problem(source))],
            lease_id=lambda: f"{next(self._numbers):032x}",
            seed=self._numbers.__next__,
        )
        self.run(lottery.open_first_epoch, self.audits, 0)
        if budget_micros:
            self.run(store.append, Deposit(reference="opening", amount_micros=budget_micros), 0)

    def problem(self, source: PromptRef) -> PromptRef:
        """Return a problem; the first one comes again after so many, where the train split ends."""
        return PromptRef(source.split, source.number % self.problems) if self.problems else source

    def reward(self, source: PromptRef, completion: list[int]) -> Reward:
        return reward(self.problem(source), completion)

    def run(self, effect: Any, *arguments: Any, **named: Any) -> Any:
        return self.database.run_now(effect, *arguments, **named)

    def reopen(self) -> None:
        """Restart the coordinator: only the file is left."""
        self.database.close()
        self.database = Database(self.where)

    def join(self, number: int, price: int = PRICE) -> NodeKey:
        key = NodeKey(number.to_bytes(32))
        message = Register(name=f"node {number}", price_micros_per_mtok=price, addresses=("127.0.0.1:1",), agent="")
        self.run(registry.register, key.node_id, message, max_price=10 * PRICE, now_ms=self.now_ms)
        return key

    def publish(self, version: int, update: int) -> None:
        made = manifest(version, update)
        self.run(policy_versions.record, made, digest(made.to_bytes()), now_ms=self.now_ms)

    def offer(
        self,
        key: NodeKey,
        *,
        version: int = 1,
        groups: int = 1,
        continues: bool = False,
        finishing: bool = False,
        numerics: str | None = None,
        place: str = "",
    ) -> LeaseReply:
        if numerics is None:
            numerics = (*self.terms.classes, "")[0]
        message = LeaseRequest(
            version=version, groups=groups, continues=continues, finishing=finishing, numerics=numerics
        )
        reply: LeaseReply = self.run(
            offers.offer, key.node_id, message, terms=self.terms, draw=self.draw, place=place, now_ms=self.now_ms
        )
        return reply

    def prove(self, owner: NodeKey, groups: int = 100) -> None:
        """Have so many groups of an owner found right, as if there had been any."""
        self.run(standings.count, owner.node_id, groups)
        self.run(standings.put, owner.node_id, OwnerStanding(claims=groups, groups=groups))

    def lease(self, key: NodeKey, *, version: int = 1) -> Lease:
        """Request a lease, which must be available."""
        (lease,) = self.offer(key, version=version).leases
        return lease

    def submit(self, key: NodeKey, envelope: bytes) -> Verdict:
        verdicts: tuple[Verdict, ...] = self.run(
            claims.receive_rollouts,
            key.node_id,
            checked_rollouts.read_rollouts(key.node_id, [envelope]),
            judge=self.judge,
            now_ms=self.now_ms,
        )
        return verdicts[0]

    def tell(self, key: NodeKey, *told: bytes, held: Sequence[Lease] = ()) -> LeaseProgressReply:
        """Say which leases a node holds, and what it has sampled of them."""
        ids, words = [lease.lease_id for lease in held], checked_rollouts.read_fragments(key.node_id, told)
        reply: LeaseProgressReply = self.run(
            claims.take_progress, key.node_id, ids, words, judge=self.judge, now_ms=self.now_ms
        )
        return reply

    def earn(self, key: NodeKey, *, version: int = 1) -> Verdict:
        """Take a lease and answer it well."""
        verdict = self.submit(key, answer(key, self.lease(key, version=version)))
        assert verdict.outcome == "accepted", verdict
        return verdict

    def expire(self) -> int:
        ended: int = self.run(leases.expire, terms=self.terms, now_ms=self.now_ms)
        return ended

    def give_back(self, key: NodeKey, *given: Lease) -> int:
        message = ReturnLeases(lease_ids=tuple(lease.lease_id for lease in given))
        ended: int = self.run(leases.give_back, key.node_id, message, terms=self.terms, now_ms=self.now_ms)
        return ended

    def batch(self, number: int) -> TrainingBatch | None:
        batch: TrainingBatch | None = self.run(
            batches.get,
            number,
            terms=self.terms,
            audits=self.audits,
            now_ms=self.now_ms,
        )
        return batch

    def report(self, number: int, mismatched: Sequence[str] = ()) -> bool:
        message = UpdateReport(number=number, mismatched=tuple(mismatched), metrics={}, idle_s=1.0, busy_s=3.0)
        settled: bool = self.run(batches.report, message, audits=self.audits, now_ms=self.now_ms)
        return settled

    def train(self, number: int) -> TrainingBatch:
        """Form a batch, which must be ready, and report it."""
        batch = self.batch(number)
        assert batch is not None
        self.report(number)
        return batch

    def release_leftovers(self) -> int:
        left: int = self.run(batches.release_leftovers, audits=self.audits, now_ms=self.now_ms)
        self.run(escrow.settle_all, self.audits, self.now_ms)
        return left

    def take_cases(self, auditor: str = "auditor", at_most: int = 64) -> list[str]:
        """The claims that an auditor is given."""
        taken: Cases = self.run(audits.assign_cases, auditor, at_most, terms=self.audits, now_ms=self.now_ms)
        return [case.claim_id for case in taken.cases]

    def find(self, claim_id: str, finding: Finding = "pass") -> bool:
        """Record an auditor's finding about a claim; return False if it was not expected."""
        verdict = Judged(claim_id=claim_id, finding=finding, validator="replay/1", report=b"{}")
        counted: int = self.run(audits.record_verdicts, (verdict,), terms=self.audits, now_ms=self.now_ms)
        return bool(counted)

    def leave(self, key: NodeKey, tokens: dict[int, list[int]], *, heir: NodeKey) -> Lease:
        """A node tells of some tokens and gives up; the lease of another that goes on."""
        lease = self.lease(key)
        assert self.tell(key, fragment(key, lease, tokens)).taken
        self.give_back(key, lease)
        (after,) = self.offer(heir, continues=True).leases
        assert after.prefixes
        return after

    def tighten(self, staleness: int) -> None:
        """Restart the round with a smaller S, as an operator does."""
        self.terms = replace(self.terms, staleness=staleness)
        self.judge = replace(self.judge, terms=self.terms)

    def rows(self, table: sa.Table) -> list[dict[str, Any]]:
        """All rows of a table, on every database in one order: claims as they were credited, others by their keys."""
        order: list[sa.ColumnElement[Any]] = list(table.primary_key)
        if [column.name for column in table.primary_key] == ["claim_id"]:
            credited = ledger_tables.entries_table.c.effect == sa.literal("pending:") + table.c.claim_id
            order.insert(0, sa.select(ledger_tables.entries_table.c.index).where(credited).scalar_subquery())
        found: list[dict[str, Any]] = self.run(
            lambda conn: [dict(row) for row in conn.execute(sa.select(table).order_by(*order)).mappings()]
        )
        return found

    def group_states(self) -> dict[int, str]:
        return {row["group_no"]: row["state"] for row in self.rows(tables.groups)}

    def lease_states(self) -> dict[str, str]:
        return {row["lease_id"]: row["state"] for row in self.rows(tables.leases)}

    def rejected(self) -> dict[str, int]:
        """Return the number of rejections by code."""
        codes = [row["code"] for row in self.rows(tables.rejections)]
        return {
            code: sum(row["count"] for row in self.rows(tables.rejections) if row["code"] == code) for code in codes
        }

    def owed(self, node: NodeId) -> tuple[int, int]:
        """Pending and payable micro-units of a node."""
        balances = self.run(store.balances)
        return balances.get(pending(node), 0), balances.get(payable(node), 0)

    def budget(self) -> int:
        micros: int = self.run(store.balances).get(BUDGET, 0)
        return micros

    def audit(self) -> list[Difference]:
        found: list[Difference] = self.run(store.rebuild)
        return found

    def dump(self) -> dict[str, list[tuple[Any, ...]]]:
        """Every row of every table."""

        def read(conn: sa.Connection) -> dict[str, list[tuple[Any, ...]]]:
            every = [table for room in (tables, ledger_tables) for table in room.metadata.sorted_tables]
            return {table.name: [tuple(row) for row in conn.execute(sa.select(table))] for table in every}

        dumped: dict[str, list[tuple[Any, ...]]] = self.run(read)
        return dumped


def honest_sample(lease: Lease) -> Sample:
    tokens = [int(unpack_tokens(lease.prompt)[0]), END]
    return Sample(tokens=pack_tokens(tokens), logprobs=pack_logprobs([-0.5, -0.1]), finish="stop")


def fragment(key: NodeKey, lease: Lease, tokens: dict[int, list[int]], **change: Any) -> bytes:
    """A signed fragment: the first tokens of some samples, by their numbers."""
    parts = tuple(
        FragmentPart(
            sample=number,
            start=0,
            tokens=pack_tokens(new),
            logprobs=pack_logprobs([-0.25] * len(new)),
            finish="stop" if new[-1] == END else "",
        )
        for number, new in tokens.items()
    )
    fields: dict[str, Any] = {
        "round_id": ROUND,
        "lease_id": lease.lease_id,
        "lease_digest": lease.digest,
        "previous": "",
        "parts": parts,
    }
    return key.seal("fragment", Fragment(**(fields | change)).to_bytes())


def rest(lease: Lease) -> tuple[Sample, ...]:
    """The samples of an honest node that goes on from a lease's prefixes."""
    honest = [int(unpack_tokens(lease.prompt)[0]), END]
    samples = []
    for prefix in lease.prefixes:
        new = honest[len(prefix.tokens) // 4 :]
        samples.append(Sample(tokens=pack_tokens(new), logprobs=pack_logprobs([-0.5] * len(new)), finish="stop"))
    return tuple(samples)


def claim(lease: Lease, **change: Any) -> RolloutClaim:
    """An honest claim, but for what is changed."""
    fields: dict[str, Any] = {
        "round_id": ROUND,
        "lease_id": lease.lease_id,
        "lease_digest": lease.digest,
        "samples": rest(lease) or (honest_sample(lease),) * lease.samples,
    }
    return RolloutClaim(**(fields | change))


def answer(key: NodeKey, lease: Lease, **change: Any) -> bytes:
    """The signed claim."""
    return key.seal("rollout", claim(lease, **change).to_bytes())
