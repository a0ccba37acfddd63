"""The unit of a round as a node reads it: from its trust state, or from the first root that the round id pins."""

from pathlib import Path
from typing import Any, cast

import pytest

from coordinator.publishing.signed_metadata import SignedMetadata, utc_now
from protocol.errors import UntrustedRoot
from protocol.policy import root_document
from protocol.text.money import CREDITS, Unit
from swarm_node.coordinator_api.origin import Origin
from swarm_node.versions.updater import _save, round_unit

EUR = Unit("EUR", 2)


class Documents:
    """An origin that serves one document under every name."""

    def __init__(self, data: bytes | None) -> None:
        self._data = data

    async def document(self, _name: str, _max_bytes: int) -> bytes | None:
        return self._data


def origin(data: bytes | None) -> Origin:
    return cast(Origin, Documents(data))


def made(folder: Path, **unit: Any) -> tuple[bytes, str]:
    """Return the first root of a new round, and the round's id."""
    metadata = SignedMetadata.create(folder / "keys", folder / "metadata", 600.0, utc_now(), **unit)
    return metadata.roots()[0], metadata.round_id


@pytest.mark.trio
async def test_the_first_root_has_the_unit(tmp_path: Path) -> None:
    root, round_id = made(tmp_path, unit=EUR)
    assert await round_unit(origin(root), round_id) == EUR


@pytest.mark.trio
async def test_a_coordinator_cannot_name_another_unit_than_the_pinned_one(tmp_path: Path) -> None:
    root, round_id = made(tmp_path, unit=EUR)
    with pytest.raises(UntrustedRoot):
        await round_unit(origin(root.replace(b'"EUR"', b'"USD"')), round_id)


@pytest.mark.trio
async def test_a_hostile_unit_in_a_root_is_shown_as_credits(tmp_path: Path) -> None:
    root, round_id = made(tmp_path, unit=Unit("\x1b[2J", 2))
    assert await round_unit(origin(root), round_id) == CREDITS


@pytest.mark.trio
async def test_the_trust_state_of_this_node_is_enough_without_a_network(tmp_path: Path) -> None:
    root, round_id = made(tmp_path, unit=EUR)
    _save(tmp_path / "trust", root_document.pin(root, round_id))
    assert await round_unit(None, round_id, tmp_path / "trust") == EUR
    assert await round_unit(None, round_id, tmp_path / "no-trust") == CREDITS
