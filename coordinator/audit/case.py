"""Audit cases: a claim with all that its audit needs, from a round's store or from an exported folder.

- A case folder has `case` (canonical bytes: lease, signed rollout or fragments, sampler), `tolerances.json`, and
  `policies/VERSION/` in hub format: the claimed version, and those to compare it with. The verdict can be repeated with
  this folder alone.
- Signatures are checked whenever a case is opened, so the evidence is always what the node signed. The other contents
  of a folder depend on the trust in its maker: prompt, sampler, tolerances and weights.
- The round's store is only read, so a coordinator may be running meanwhile.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar
from urllib.parse import quote

import sqlalchemy as sa

from coordinator.base.files import read_at_most
from coordinator.config import Config, fixed
from coordinator.publishing.publish import Publisher
from coordinator.publishing.signed_metadata import SignedMetadata
from coordinator.rules import calibration
from coordinator.store.state import engine, require_usable
from coordinator.store.tables import audits, leases, rollouts
from coordinator.tasks.task_text import policy_bounds
from coordinator.transactions import partial_rollouts
from protocol import limits
from protocol.errors import AuditFailed, TokensInvalid
from protocol.policy import chunks
from protocol.policy.manifest import Sampler, version_of
from protocol.wire.signing import Signed, open_envelope
from protocol.work.auditing import CaseFile
from protocol.work.fragment import check_fragments
from protocol.work.lease import Lease
from protocol.work.rollout import Completion, PolicyBounds, RolloutClaim, check_claim, unpack_tokens

P = ParamSpec("P")
T = TypeVar("T")

FILE = "case"
POLICIES = "policies"

CASE_MAX_BYTES = 2 * limits.REQUEST_MAX_BYTES
"""The largest case: a rollout and its lease."""

NEIGHBOURS_MAX = 17
"""The most versions that a claim is compared with, each of them loaded: those of an export, and the one after it."""


@dataclass(frozen=True)
class Case:
    """An opened claim."""

    claim_id: str
    node: str
    round_id: str
    lease: Lease
    claim: RolloutClaim | tuple[bytes, ...]
    """A rollout, or the payloads of the fragments of a group that another node finished."""
    sampler: Sampler
    bounds: PolicyBounds
    neighbours: tuple[int, ...]
    """The versions to compare it with."""

    def completions(self) -> tuple[Completion, ...]:
        """Return the node's own tokens, without those of other nodes, if its lease allows them."""
        if isinstance(self.claim, RolloutClaim):
            return check_claim(self.claim, self.lease, self.round_id, self.bounds)
        return check_fragments(self.claim, self.lease, self.round_id, self.bounds)


class RoundArchive:
    """The stored data of a round: claims, and the versions that are still kept."""

    def __init__(self, config: Config) -> None:
        self._folder = folder = config.round.directory
        if not fixed.is_round(folder):
            raise AuditFailed(f"There is no round in {folder}.", hint="Give the TOML file of a launched round.")
        require_usable(folder / "state.db", os.R_OK)
        read_only = f"sqlite:///file:{quote(str(folder / 'state.db'))}?mode=ro&uri=true"
        self._engine = engine(config.store.url) if config.store.url else sa.create_engine(read_only)
        self.metadata = SignedMetadata(folder / "keys", folder / "metadata", config.publish.timestamp_lifetime_s)
        self.publisher = Publisher(
            folder=folder,
            metadata=self.metadata,
            task=config.task.name,
            sampler=Sampler(temperature=config.sampling.temperature, max_new_tokens=config.sampling.max_new_tokens),
            chunk_size_bytes=config.publish.chunk_size_bytes,
            keep=config.staleness.max_updates + 2,
        )

    def close(self) -> None:
        self._engine.dispose()

    def read(self, effect: Callable[Concatenate[sa.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a read-only effect on the store."""
        with self._engine.connect() as connection:
            return effect(connection, *args, **kwargs)

    def claims_of(self, node: str) -> list[str]:
        """Return the accepted claims of a node, the newest first."""
        query = sa.select(rollouts.c.claim_id).where(rollouts.c.node_id == node).order_by(rollouts.c.accepted_ms.desc())
        with self._engine.connect() as connection:
            return list(connection.execute(query).scalars())

    def file(self, claim_id: str) -> CaseFile:
        """Return a claim from the store."""
        query = (
            sa.select(audits.c.lease_id, audits.c.version, leases.c.offer)
            .join(leases, leases.c.lease_id == audits.c.lease_id)
            .where(audits.c.claim_id == claim_id)
        )
        with self._engine.connect() as connection:
            row = connection.execute(query).first()
            if row is None:
                raise AuditFailed(f"No claim {claim_id[:64]} was accepted in this round.")
            rollout, fragments = partial_rollouts.signed(connection, row.lease_id)
        sampler = self.sampler(row.version)
        if sampler is None:
            raise AuditFailed(f"The manifest of version {row.version} is missing.")
        return CaseFile(
            round_id=self.metadata.round_id, lease=row.offer, rollout=rollout, fragments=fragments, sampler=sampler
        )

    def sampler(self, version: int) -> Sampler | None:
        """Return the sampling settings of a version; None if its manifest is missing."""
        manifest = self.publisher.manifest(version)
        return manifest.sampler if manifest else None

    def newest_version(self) -> int:
        """Return the newest published version; 0 before the first."""
        return max((version_of(path) or 0 for path in self.metadata.targets()), default=0)

    def write_policy(self, version: int, folder: Path) -> int | None:
        """Write a version's folder from its chunks; return its update, or None if they were deleted."""
        return self.publisher.write_folder(version, folder)

    def case(self, claim_id: str, policies: Path) -> Case | None:
        """Return a claim without neighbours, its version below `policies`; None if the version was deleted."""
        file = self.file(claim_id)
        policy = policies / str(Lease.from_bytes(file.lease).version)
        if not policy.exists() and self.write_policy(int(policy.name), policy) is None:
            return None
        return opened(file, policy, [])

    def export(self, claim_id: str, folder: Path, *, neighbours: int) -> None:
        """Write the folder of a case, with `neighbours` versions before it (see `earlier`) and the one after it."""
        file = self.file(claim_id)
        version = Lease.from_bytes(file.lease).version
        if self.write_policy(version, folder / POLICIES / str(version)) is None:
            raise AuditFailed(f"The weights of version {version} were deleted.")
        for other in [*earlier(version, neighbours), *([version + 1] if neighbours else [])]:
            self.write_policy(other, folder / POLICIES / str(other))
        tolerances = calibration.load(self._folder, self.metadata.root())
        (folder / calibration.FILE).write_text(tolerances.model_dump_json(indent=2))
        (folder / FILE).write_bytes(file.to_bytes())


def open_case(folder: Path) -> Case:
    """Return the case in a folder."""
    try:
        data = read_at_most(folder / FILE, CASE_MAX_BYTES)
    except (OSError, ValueError) as error:
        hint = "Create one with `swarm-coordinator audit export`."
        raise AuditFailed(f"{folder} has no audit case: {error}.", hint=hint) from None
    file = CaseFile.from_bytes(data, max_bytes=CASE_MAX_BYTES)
    lease = Lease.from_bytes(file.lease)
    policy = folder / POLICIES / str(lease.version)
    if not policy.is_dir():
        raise AuditFailed(f"{folder} does not have version {lease.version}, which the rollout claims.")
    names = (path.name for path in policy.parent.iterdir() if re.fullmatch("[1-9][0-9]*", path.name))
    neighbours = sorted({int(name) for name in names} - {lease.version})
    if len(neighbours) > NEIGHBOURS_MAX:
        raise AuditFailed(
            f"{folder} has {len(neighbours)} versions to compare with; at most {NEIGHBOURS_MAX} are allowed."
        )
    return opened(file, policy, neighbours)


def opened(file: CaseFile, policy: Path, neighbours: list[int]) -> Case:
    """Return a case after checking its signatures."""
    last, claim = _signed(file)
    lease = Lease.from_bytes(file.lease)
    try:
        most = limits.POLICY_CONFIG_MAX_BYTES
        bounds = policy_bounds(lambda name: read_at_most(policy / name, most), file.sampler.max_new_tokens)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, TokensInvalid) as error:
        raise AuditFailed(f"{policy} is not a policy: {error!r}"[:300]) from None  # JSON of any shape may be the cause
    if int(unpack_tokens(lease.prompt).max()) >= bounds.vocab_size:
        raise AuditFailed(f"The lease's prompt has tokens beyond the vocabulary of {bounds.vocab_size}.")
    return Case(
        claim_id=chunks.digest(last.payload),
        node=last.signer,
        round_id=file.round_id,
        lease=lease,
        claim=claim,
        sampler=file.sampler,
        bounds=bounds,
        neighbours=tuple(neighbours),
    )


def _signed(file: CaseFile) -> tuple[Signed, RolloutClaim | tuple[bytes, ...]]:
    """Return the envelope that identifies the claim, and the claim."""
    if not file.fragments:
        signed = open_envelope("rollout", file.rollout)
        return signed, RolloutClaim.from_bytes(signed.payload)
    fragments = [open_envelope("fragment", envelope) for envelope in file.fragments]
    if len({fragment.signer for fragment in fragments}) > 1:
        raise AuditFailed("The fragments of one claim are signed by several nodes.")
    return fragments[-1], tuple(fragment.payload for fragment in fragments)


def earlier(version: int, count: int) -> list[int]:
    """Return up to `count` versions before this one, the nearest first, each twice as far back as the one before."""
    return [version - (1 << power) for power in range(count) if version > 1 << power]
