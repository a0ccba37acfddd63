"""Count of the engine's failures in a row, and the version that may be their reason.

- A version with which the engine fails repeatedly is not tried again; the node waits for the next one.
- Too many failures, with any versions, are an error: the machine needs its owner.
"""

import logging

from protocol.errors import EngineFailed, EngineNotStarted, SwarmError
from swarm_node.versions.fetcher import HeldVersion

log = logging.getLogger(__name__)

VERSION_FAILURES_MAX = 4
"""Failures in a row with one version; then the node waits for the next version, and uses no power meanwhile."""

ENGINE_FAILURES_MAX = 2 * VERSION_FAILURES_MAX
"""Failures in a row with any versions; a machine that fails this often needs its owner."""

CRASH_PAUSES_S = (0.0, 2.0, 10.0, 30.0)
"""Pauses after the first, second … failure of the engine in a row: an overheated card or a restarting driver needs
time."""


class VersionUnusable(EngineFailed):
    """The engine failed repeatedly with this version; the node waits for the next one."""

    code = "version_unusable"


class VersionFailures:
    """Failures of the engine since the last group that ended."""

    def __init__(self) -> None:
        self._count = 0
        self._suspect: HeldVersion | None = None
        """The version with which the engine last failed."""
        self._suspect_count = 0

    @property
    def pause_s(self) -> float:
        """Pause after the last failure, in seconds."""
        return CRASH_PAUSES_S[min(self._count, len(CRASH_PAUSES_S)) - 1]

    def reset(self) -> None:
        """Record that a group has ended."""
        self._count = self._suspect_count = 0

    def is_unusable(self, policy: HeldVersion) -> bool:
        """Return True if the engine has failed too often with this version."""
        return policy == self._suspect and self._suspect_count >= VERSION_FAILURES_MAX

    def count(self, error: SwarmError, policy: HeldVersion | None) -> SwarmError | None:
        """Count a failure; return the error for the owner, or None for other groups of an unusable version.

        Raise an error after `ENGINE_FAILURES_MAX` failures.
        """
        log.error("engine failed times=%d: %s", self._count + 1, error)
        if policy is not None and self.is_unusable(policy):
            return None
        self._count += 1
        if policy is not None and not isinstance(error, EngineNotStarted):  # of which no version is the reason
            self._suspect_count = self._suspect_count + 1 if policy == self._suspect else 1
            self._suspect = policy
            error = self._unusable(policy, error) if self.is_unusable(policy) else error
        if self._count >= ENGINE_FAILURES_MAX:
            raise EngineFailed(
                f"The engine failed {self._count} times in a row; the last time: {error.message}",
                hint=f"{error.hint} Run `swarm-node doctor` to test every engine.".strip(),
            ) from error
        return error

    def _unusable(self, policy: HeldVersion, error: SwarmError) -> VersionUnusable:
        return VersionUnusable(
            f"Version {policy.manifest.version} cannot be used: the engine failed {self._suspect_count} times with "
            f"it. The last time: {error.message} The node waits for the next version.",
            hint="Run `swarm-node doctor` to test every engine; if they work, report this to the operator.",
        )
