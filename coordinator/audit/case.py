"""A case: one claim with all that an audit of it needs, from a round's store or from an exported folder.

- A case folder is `case` (canonical bytes: lease, signed rollout or fragments, sampler), `tolerances.json`, and
  `policies/VERSION/` in hub format: the claimed version, and those to compare it with. Whoever holds the folder can
  repeat the verdict.
- Signatures are checked whenever a case is opened, so evidence is always what the node signed. All else in a folder
  is the word of whoever made it: prompt, sampler, tolerances and weights.
- The round's store is only read, so a coordinator may be running meanwhile.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar
from urllib.parse import quote

import sqlalchemy as sa

from coordinator.base.files import read_at_most
from coordinator.config import Config
from coordinator.publishing.publish import Publisher
from coordinator.publishing.signed_metadata import SignedMetadata
from coordinator.rules import calibration
from coordinator.store.state import engine
from coordinator.store.tables import audits, leases, rollouts
from coordinator.tasks.task_text import policy_bounds
from coordinator.transactions import partial_rollouts
from protocol import limits
from protocol.errors import AuditFailed, TokensInvalid
from protocol.policy import chunks
from protocol.policy.codec import PolicyCodec
from protocol.policy.manifest import Sampler
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
"""A rollout and its lease."""

TOKENIZER_MAX_BYTES = 64 * limits.MIB
"""Tokenizers of a quarter of a million tokens have 20 MB."""

NEIGHBOURS_MAX = 17
"""Versions that a claim is compared with, each of them loaded: as many before it as an export may have, one after."""


@dataclass(frozen=True)
class Case:
    """One claim, opened."""

    claim_id: str
    node: str
    round_id: str
    lease: Lease
    claim: RolloutClaim | tuple[bytes, ...]
    """A rollout; or the payloads of fragments, of a group that another finished."""
    sampler: Sampler
    bounds: PolicyBounds
    neighbours: tuple[int, ...]
    """Versions it shall be compared with."""

    def completions(self) -> tuple[Completion, ...]:
        """The node's own tokens, without those it was given, if its lease allows them."""
        if isinstance(self.claim, RolloutClaim):
            return check_claim(self.claim, self.lease, self.round_id, self.bounds)
        return check_fragments(self.claim, self.lease, self.round_id, self.bounds)


class RoundArchive:
    """What a round has stored: claims, and the versions that are still kept."""

    def __init__(self, config: Config) -> None:
        self._folder = folder = config.round.directory
        if not (folder / "resolved.json").exists():
            raise AuditFailed(f"There is no round in {folder}.", hint="Name the TOML file of one that was launched.")
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
        """An effect that changes nothing, on the store."""
        with self._engine.connect() as connection:
            return effect(connection, *args, **kwargs)

    def claims_of(self, node: str) -> list[str]:
        """The accepted claims of a node, the newest first."""
        query = sa.select(rollouts.c.claim_id).where(rollouts.c.node_id == node).order_by(rollouts.c.accepted_ms.desc())
        with self._engine.connect() as connection:
            return list(connection.execute(query).scalars())

    def file(self, claim_id: str) -> CaseFile:
        """A claim as it is stored."""
        query = (
            sa.select(audits.c.lease_id, audits.c.version, leases.c.offer)
            .join(leases, leases.c.lease_id == audits.c.lease_id)
            .where(audits.c.claim_id == claim_id)
        )
        with self._engine.connect() as connection:
            row = connection.execute(query).first()
            if row is None:
                raise AuditFailed(f"No claim {claim_id[:64]} was accepted in this round.")
            rollout, told = partial_rollouts.signed(connection, row.lease_id)
        sampler = self.sampler(row.version)
        if sampler is None:
            raise AuditFailed(f"The manifest of version {row.version} is gone.")
        return CaseFile(
            round_id=self.metadata.round_id, lease=row.offer, rollout=rollout, fragments=told, sampler=sampler
        )

    def sampler(self, version: int) -> Sampler | None:
        """How a version is to be sampled; None if its manifest is gone."""
        manifest = self.publisher.manifest(version)
        return manifest.sampler if manifest else None

    def write_policy(self, version: int, folder: Path) -> int | None:
        """Make a version's folder from its chunks; its update, or None if they are not kept any more."""
        return self.publisher.write_folder(version, folder)

    def case(self, claim_id: str, policies: Path) -> Case | None:
        """A claim without neighbours, its version below `policies`; None if that is not kept any more."""
        file = self.file(claim_id)
        policy = policies / str(Lease.from_bytes(file.lease).version)
        if not policy.exists() and self.write_policy(int(policy.name), policy) is None:
            return None
        return opened(file, policy, [])

    def export(self, claim_id: str, folder: Path, *, neighbours: int) -> None:
        """Write the folder of a case, with `earlier` versions, as many as asked for, and the one after it."""
        file = self.file(claim_id)
        version = Lease.from_bytes(file.lease).version
        if self.write_policy(version, folder / POLICIES / str(version)) is None:
            raise AuditFailed(f"The weights of version {version} are not kept any more.")
        for other in [*earlier(version, neighbours), *([version + 1] if neighbours else [])]:
            self.write_policy(other, folder / POLICIES / str(other))
        tolerances = calibration.load(self._folder, self.metadata.root())
        (folder / calibration.FILE).write_text(tolerances.model_dump_json(indent=2))
        (folder / FILE).write_bytes(file.to_bytes())


def open_case(folder: Path) -> Case:
    """A case from its folder."""
    try:
        data = read_at_most(folder / FILE, CASE_MAX_BYTES)
    except (OSError, ValueError) as error:
        hint = "Make one with `swarm-coordinator audit export`."
        raise AuditFailed(f"{folder} holds no case: {error}.", hint=hint) from None
    file = CaseFile.from_bytes(data, max_bytes=CASE_MAX_BYTES)
    lease = Lease.from_bytes(file.lease)
    policy = folder / POLICIES / str(lease.version)
    if not policy.is_dir():
        raise AuditFailed(f"{folder} lacks version {lease.version}, which the rollout claims.")
    names = (path.name for path in policy.parent.iterdir() if re.fullmatch("[1-9][0-9]*", path.name))
    neighbours = sorted({int(name) for name in names} - {lease.version})
    if len(neighbours) > NEIGHBOURS_MAX:
        raise AuditFailed(f"{folder} compares with {len(neighbours)} versions; {NEIGHBOURS_MAX} are enough.")
    return opened(file, policy, neighbours)


def opened(file: CaseFile, policy: Path, neighbours: list[int]) -> Case:
    """A case whose signatures were checked."""
    last, claim = _signed(file)
    lease = Lease.from_bytes(file.lease)
    try:
        most = limits.POLICY_CONFIG_MAX_BYTES
        bounds = policy_bounds(lambda name: read_at_most(policy / name, most), file.sampler.max_new_tokens)
        if lease.episode is not None:
            bounds = replace(bounds, codec=_codec(policy))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, TokensInvalid) as error:
        raise AuditFailed(f"{policy} is no policy: {error!r}"[:300]) from None  # as JSON of any shape may raise
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


def _codec(policy: Path) -> PolicyCodec:
    """The policy's tokenizer, by which an episode is played again."""
    try:
        return PolicyCodec(read_at_most(policy / "tokenizer.json", TOKENIZER_MAX_BYTES).decode())
    except Exception as error:  # the library raises nothing more special
        raise AuditFailed(f"{policy} has no tokenizer that can be read: {error!r}"[:300]) from None


def _signed(file: CaseFile) -> tuple[Signed, RolloutClaim | tuple[bytes, ...]]:
    """What stands for the claim, and the claim."""
    if not file.fragments:
        signed = open_envelope("rollout", file.rollout)
        return signed, RolloutClaim.from_bytes(signed.payload)
    told = [open_envelope("fragment", envelope) for envelope in file.fragments]
    if len({one.signer for one in told}) > 1:
        raise AuditFailed("The fragments of one claim are signed by several nodes.")
    return told[-1], tuple(one.payload for one in told)


def earlier(version: int, count: int) -> list[int]:
    """So many versions before this one, the nearest first, each twice as far back as the last: few that reach far."""
    return [version - (1 << power) for power in range(count) if version > 1 << power]
