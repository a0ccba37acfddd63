"""The node's trust state: pinned once, brought up to date, and saved only when every check has passed."""

from datetime import UTC, datetime
from pathlib import Path

import trio

from protocol import canonical, limits, trust
from protocol.errors import NotFound, SwarmError, UntrustedMetadata
from protocol.manifest import PolicyManifest
from protocol.trust import Documents
from swarm_node.api_client import Coordinator
from swarm_node.disk import full_disk_named, write_durably

STATE_MAX_BYTES = 8 * limits.MIB
"""Five documents at their limits."""


class Updater:
    """Follows the signed versions of one round."""

    def __init__(self, coordinator: Coordinator, round_id: str, path: Path) -> None:
        self._coordinator = coordinator
        self._round_id = round_id
        self._path = path
        self._documents: Documents | None = _load(path)
        self.proved_until: datetime | None = None
        """Until when the last refresh vouches for its version; None before the first."""

    async def refresh(self) -> PolicyManifest | None:
        """The newest signed policy, or None before the first; raises when nothing on offer can be trusted."""
        stored = self._documents or await self._pin()
        refreshed = await self._converse(trust.refresh(stored, datetime.now(UTC)))
        if refreshed.documents != self._documents:
            await trio.to_thread.run_sync(_save, self._path, refreshed.documents)
            self._documents = refreshed.documents
        self.proved_until = refreshed.proved_until
        return refreshed.manifest

    async def _converse(self, conversation: trust.Conversation) -> trust.Refreshed:
        """Fetch what the conversation asks for until it comes to its end."""
        answer: bytes | None = None
        while True:
            try:
                wanted = conversation.send(answer)
            except StopIteration as done:
                result: trust.Refreshed = done.value
                return result
            answer = await self._coordinator.document(wanted.name, wanted.max_bytes)
            if answer is None and not wanted.optional:
                raise NotFound(f"The coordinator has no document {wanted.name}.", hint="Is it still starting?")

    async def _pin(self) -> Documents:
        root = await self._coordinator.document("1.root.json", limits.METADATA_MAX_BYTES)
        if root is None:
            raise NotFound("The coordinator has no root document.", hint="Is this address a coordinator?")
        return trust.pin(root, self._round_id)


def _save(path: Path, documents: Documents) -> None:
    with full_disk_named(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, canonical.encode(vars(documents)), temp_folder=path.parent)


def _load(path: Path) -> Documents | None:
    """The saved state; a damaged file is an error, since starting over would forget what was already seen."""
    if not path.exists():
        return None
    try:
        return Documents(**canonical.decode(path.read_bytes(), max_bytes=STATE_MAX_BYTES))
    except (SwarmError, TypeError) as error:
        raise UntrustedMetadata(
            f"The saved trust state {path} is damaged: {error}.",
            hint="Remove the file to pin the round anew; rollback protection then starts from today.",
        ) from error
