"""`move`: a round that has no work for the node is refused before the node leaves the one that has."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from protocol.errors import ConfigInvalid, UntrustedRoot
from swarm_node.commands.preview import require_open
from swarm_node.coordinator_api.join_string import parse

OTHER = parse(f"https://other.example#{'a' * 64}")


def coordinator(root: bytes | None, *, finished: bool) -> Any:
    async def document(_name: str, _max_bytes: int) -> bytes | None:
        await trio.lowlevel.checkpoint()
        return root

    async def status() -> dict[str, Any]:
        await trio.lowlevel.checkpoint()
        return {"finished": finished}

    return cast(Any, SimpleNamespace(origin=SimpleNamespace(document=document), status=status))


@pytest.mark.trio
async def test_a_finished_round_is_refused() -> None:
    await require_open(coordinator(None, finished=False), OTHER)
    with pytest.raises(ConfigInvalid, match=r"The round at https://other\.example is finished"):
        await require_open(coordinator(None, finished=True), OTHER)


@pytest.mark.trio
async def test_another_round_than_the_join_string_names_is_refused() -> None:
    with pytest.raises(UntrustedRoot):
        await require_open(coordinator(b"another root", finished=False), OTHER)
