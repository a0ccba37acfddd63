"""The node's trust state: pinned once, refreshed, and saved only when every check has passed.

- Documents that may change or appear (the timestamp, the next root) come from the coordinator; documents that a signed
  document names by number and hash may come from any origin.
- An origin that serves wrong documents costs a second try with the coordinator alone. If the coordinator does not
  answer, an origin's documents are used: their signatures are checked, and their timestamp expires like any other.
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from protocol import limits
from protocol.errors import MessageTooLarge, NotFound, SwarmError, Unreachable, UntrustedMetadata
from protocol.policy import root_document
from protocol.policy.description import RoundDescription, open_description
from protocol.policy.manifest import PolicyManifest
from protocol.policy.origin import may_change
from protocol.policy.root_document import Documents
from protocol.text.money import CREDITS, Unit
from protocol.wire import canonical
from swarm_node.base.disk import disk_named, write_durably
from swarm_node.coordinator_api.origin import Origin
from swarm_node.coordinator_api.origins import Origins

if TYPE_CHECKING:
    from protocol.policy.trust import Refreshed, WantedDocument

STATE_MAX_BYTES = 8 * limits.MIB
"""Five documents at their limits."""


class Updater:
    """Trust state of one round, refreshed from signed documents."""

    def __init__(self, origins: Origins, round_id: str, path: Path) -> None:
        self._origins = origins
        self._round_id = round_id
        self._path = path
        self._documents: Documents | None = saved(path)
        self.proved_until: datetime | None = None
        """End of validity of the last refresh; None before the first."""

    @property
    def unit(self) -> Unit:
        """The unit of the round's amounts, by the trusted root; `CREDITS` before the first refresh."""
        return CREDITS if self._documents is None else root_document.unit_of(self._documents.root)

    async def refresh(self) -> PolicyManifest | None:
        """Return the newest signed policy, or None before the first; raise an error if none can be trusted."""
        stored = self._documents or await self._pin()
        refreshed = await self._newest(stored)
        if refreshed.documents != self._documents:
            await trio.to_thread.run_sync(_save, self._path, refreshed.documents)
            self._documents = refreshed.documents
        self.proved_until = refreshed.proved_until
        return refreshed.manifest

    async def description(self) -> RoundDescription | None:
        """Return what the operator says about the round, as signed at the last refresh; None if nothing is said."""
        from protocol.policy.trust import wanted_description

        wanted = wanted_description(self._documents) if self._documents else None
        if wanted is None:
            return None
        data = await self._origins.home.document(wanted.name, wanted.max_bytes)
        if data is None:
            raise NotFound(f"The coordinator does not serve {wanted.name}.", hint="It may have changed; try again.")
        return open_description(data, wanted.name, self._round_id)

    async def _newest(self, stored: Documents) -> "Refreshed":
        """Refresh from the coordinator, or from an origin if the coordinator does not answer."""
        home, others = self._origins.home, self._origins.in_order()
        try:
            for bulk in [*others[:1], home]:
                try:
                    return await self._converse(stored, home, bulk)
                except (Unreachable, NotFound):
                    raise
                except SwarmError as error:
                    if bulk is home:
                        raise
                    self._origins.failed(bulk, error)
        except (Unreachable, NotFound):
            for other in others:
                try:
                    return await self._converse(stored, other, other)
                except SwarmError as error:
                    self._origins.failed(other, error)
            raise
        raise AssertionError("the last try is the coordinator's")

    async def _converse(self, stored: Documents, fresh: Origin, bulk: Origin) -> "Refreshed":
        """Fetch the documents that the trust conversation requests, until it ends."""
        from protocol.policy.trust import refresh

        conversation = refresh(stored, datetime.now(UTC))
        answer: bytes | None = None
        while True:
            try:
                wanted = conversation.send(answer)
            except StopIteration as done:
                result: Refreshed = done.value
                return result
            answer = await self._document(wanted, fresh, bulk)
            if answer is None and not wanted.optional:
                raise NotFound(
                    f"The coordinator does not serve {wanted.name}.", hint="It may still be starting; try again."
                )

    async def _document(self, wanted: "WantedDocument", fresh: Origin, bulk: Origin) -> bytes | None:
        named_by_hash = not wanted.optional and not may_change(wanted.name)
        if bulk is not fresh and named_by_hash and self._origins.fit(bulk):
            try:
                data = await bulk.document(wanted.name, wanted.max_bytes)
            except (Unreachable, MessageTooLarge) as error:
                self._origins.failed(bulk, error)
            else:
                if data is not None:
                    return data
        return await fresh.document(wanted.name, wanted.max_bytes)

    async def _pin(self) -> Documents:
        root = await self._origins.home.document("1.root.json", limits.METADATA_MAX_BYTES)
        if root is None:
            raise NotFound("The coordinator has no root document.", hint="Check that this address is a coordinator.")
        return root_document.pin(root, self._round_id)


async def round_unit(origin: Origin | None, round_id: str, path: Path | None = None) -> Unit:
    """Return the unit of a round: by the trust state in `path`, or by the first root, which the round id pins.

    If neither is available, it is `CREDITS`.
    """
    documents = saved(path) if path else None
    if documents is not None:
        return root_document.unit_of(documents.root)
    root = await origin.document("1.root.json", limits.METADATA_MAX_BYTES) if origin else None
    return CREDITS if root is None else root_document.unit_of(root_document.pin(root, round_id).root)


def _save(path: Path, documents: Documents) -> None:
    with disk_named(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, canonical.encode(vars(documents)), temp_folder=path.parent)


def saved(path: Path) -> Documents | None:
    """Load the saved state; a damaged file is an error, since a fresh start would lose rollback protection."""
    if not path.exists():
        return None
    try:
        return Documents(**canonical.decode(path.read_bytes(), max_bytes=STATE_MAX_BYTES))
    except (SwarmError, TypeError) as error:
        raise UntrustedMetadata(
            f"The saved trust state {path} is damaged: {error}.",
            hint="Remove the file to trust the round again from its join string; rollback protection then restarts.",
        ) from error
