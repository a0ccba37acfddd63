"""The alarms of a round: each has a code, a severity, and a text with its cause and the next step.

- A `critical` alarm means that nothing is trained or money is lost until somebody acts; a `warning` can wait for a day.
- The code stays the same for as long as an alarm lasts; figures in its text change.
- Disk, keys and certificates are checked on the machine that leads the round, from its files alone.
"""

import json
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from cryptography import x509

from coordinator.config import Config
from protocol.text.plain import duration_text

Severity = Literal["critical", "warning"]

CRITICAL = frozenset({"program_ended", "no_rewards", "updates_skipped", "disk_low"})

DISK_FREE_MIN_BYTES = 4 * 2**30
DISK_FREE_MIN_SHARE = 0.05
"""The alarm rises when both are undercut: 5 % of a large disk are many versions."""

METADATA, CERTIFICATE = "metadata", "certificate"

SIGNED = ("root", "targets", "snapshot")
"""Roles of the trust metadata that live for a year; the timestamp is signed again every few minutes."""

DAY_S = 86_400.0
SIGNED_LEFT_MIN_S = 30 * DAY_S
CERTIFICATE_LEFT_MIN_S = 14 * DAY_S
"""Half of what certbot and Caddy leave: they renew a certificate of 90 days with 30 days left."""


@dataclass(frozen=True)
class Alarm:
    """A call to act."""

    code: str
    severity: Severity
    text: str


def raised(found: Iterable[tuple[str, str]]) -> list[dict[str, str]]:
    """Return the alarms of pairs of code and text, without those that have no text."""
    alarms = (Alarm(code, "critical" if code in CRITICAL else "warning", text) for code, text in found if text)
    return [asdict(alarm) for alarm in alarms]


def upkeep(config: Config, now_ms: int) -> dict[str, Any]:
    """Return the free disk space and the seconds until documents expire, by name."""
    folder = config.round.directory
    disk = shutil.disk_usage(folder if folder.exists() else Path.cwd())  # a follower's copy may have its store alone
    left_s = {name: (moment - now_ms / 1000) for name, moment in _expiries(config).items()}
    return {"disk": {"free_bytes": disk.free, "size_bytes": disk.total}, "expires_s": left_s}


def upkeep_alarms(figures: dict[str, Any], config: Config) -> list[tuple[str, str]]:
    """Return the alarms for a full disk and for documents that expire soon, as pairs of code and text."""
    disk, left_s = figures["disk"], figures["expires_s"]
    found = [("disk_low", _disk_alarm(disk["free_bytes"], disk["size_bytes"], config.round.directory))]
    for name, seconds in left_s.items():
        least_s = CERTIFICATE_LEFT_MIN_S if name == CERTIFICATE else SIGNED_LEFT_MIN_S
        found.append((f"{name}_expires", _expiry_alarm(name, seconds, config) if seconds < least_s else ""))
    return found


def _disk_alarm(free_bytes: int, size_bytes: int, folder: Path) -> str:
    if free_bytes >= DISK_FREE_MIN_BYTES or free_bytes >= DISK_FREE_MIN_SHARE * size_bytes:
        return ""
    return (
        f"The disk of {folder} has {free_bytes / 2**30:.1f} of {size_bytes / 2**30:.0f} GiB left. When it is full, "
        "nothing is acknowledged or published. Free some space, or lower publish.keep and audit.kept_gib."
    )


def _expiry_alarm(name: str, seconds: float, config: Config) -> str:
    when = f"expires in {duration_text(seconds)}" if seconds > 0 else f"expired {duration_text(-seconds)} ago"
    if name == CERTIFICATE:
        return f"The certificate {config.round.tls_certificate} {when}. Renew it: it is loaded within the hour."
    if name == "root":
        cure = "`swarm-coordinator keys rotate root` signs a new one with the root keys"
    else:
        cure = "the next published version has a new one; if nothing is trained any more, end the round"
    return f"The signed document {name} {when}; nodes then reject everything. Next: {cure}."


def _expiries(config: Config) -> dict[str, float]:
    """Return the time at which each document expires, in seconds since 1970."""
    folder, found = config.round.directory / METADATA, dict[str, float]()
    for role in SIGNED:
        versions = [path for path in folder.glob(f"*.{role}.json") if path.name.partition(".")[0].isdigit()]
        newest = max(versions, key=lambda path: int(path.name.partition(".")[0]), default=None)
        if newest is not None and (moment := _of_document(newest)) is not None:
            found[role] = moment
    if config.round.tls_listen and (moment := _of_certificate(config.round.tls_certificate)) is not None:
        found[CERTIFICATE] = moment
    return found


@lru_cache(maxsize=16)
def _of_document(path: Path) -> float | None:
    """Return the expiry in a signed document, which never changes; None if it cannot be read."""
    try:
        expires = json.loads(path.read_bytes())["signed"]["expires"]
        return datetime.strptime(expires, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _of_certificate(path: Path) -> float | None:
    try:
        return _end_of_certificate(path, path.stat().st_mtime_ns)
    except OSError:
        return None


@lru_cache(maxsize=4)
def _end_of_certificate(path: Path, _changed_ns: int) -> float | None:
    """Return the expiry of the first certificate in a PEM file; None if it has none."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc.timestamp()
    except (OSError, ValueError):
        return None
