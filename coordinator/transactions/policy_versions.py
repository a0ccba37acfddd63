"""Published versions in the store: recorded in order, and the choice of those whose files are kept."""

from typing import NamedTuple

import sqlalchemy as sa

from coordinator.config.round import PublishSection
from coordinator.store.tables import versions
from ledger import store
from ledger.entry import Version
from ledger.prepared import Prepared
from protocol.errors import OutOfOrder
from protocol.policy.manifest import PolicyManifest


class Keeping(NamedTuple):
    """The versions that the operator wants to keep whole, beside those that rollouts may use."""

    newest: int
    age_ms: int
    every: int

    @classmethod
    def by(cls, settings: PublishSection) -> "Keeping":
        """Return the versions to keep by the operator's settings."""
        return cls(settings.keep, int(3_600_000 * settings.keep_h), settings.keep_every)

    def chosen(self, connection: sa.Connection, now_ms: int) -> list[int]:
        """Return the numbers of these versions."""
        cols, last = versions.c, newest_version(connection).version
        wanted = cols.version > last - self.newest
        if self.age_ms:
            wanted |= cols.published_ms > now_ms - self.age_ms
        if self.every:
            wanted |= cols.version % self.every == 0
        return list(connection.execute(sa.select(cols.version).where(wanted).order_by(cols.version)).scalars())


def record(connection: sa.Connection, manifest: PolicyManifest, digest: str, *, now_ms: int) -> None:
    """Record a published version in the store and in the ledger; the same version again changes nothing."""
    row = connection.execute(
        sa.select(versions.c.manifest_digest).where(versions.c.version == manifest.version)
    ).first()
    if row is not None:
        if row[0] != digest:
            raise OutOfOrder(f"Version {manifest.version} was already published with other content.")
        return
    newest, _ = newest_version(connection)
    if manifest.version != newest + 1:
        raise OutOfOrder(f"Version {manifest.version} does not follow version {newest}.")
    store.append(connection, Version(version=manifest.version, manifest_digest=digest), now_ms)
    connection.execute(
        sa.insert(versions).values(
            version=manifest.version,
            policy_update=manifest.update,
            manifest_digest=digest,
            size_bytes=sum(entry.size_bytes for entry in manifest.files),
            published_ms=now_ms,
        )
    )


class NewestVersion(NamedTuple):
    """The newest version and its update; 0 and 0 before the first."""

    version: int = 0
    policy_update: int = 0


_newest = Prepared(
    sa.select(versions.c.version, versions.c.policy_update).order_by(versions.c.version.desc()).limit(1), NewestVersion
)


def newest_version(connection: sa.Connection) -> NewestVersion:
    """Return the newest version and its update."""
    return _newest(connection).first() or NewestVersion()


def newest_size_bytes(connection: sa.Connection) -> int:
    """Return the size of the newest version's files; 0 if there is none."""
    newest = sa.select(versions.c.size_bytes).order_by(versions.c.version.desc()).limit(1)
    return int(connection.execute(newest).scalar() or 0)
