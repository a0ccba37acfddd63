"""A version's tokenizer takes all the memory and time that it gets: the child's, within limits, and never the agent's.

The agent here is this process, with the real client and the real child; its memory is looked at before and after.
"""

import os
from pathlib import Path

import pytest
import trio
from tokenizers import models, normalizers, pre_tokenizers, processors

from protocol import limits
from protocol.errors import EngineFailed
from protocol.tasks import stand_in
from swarm_node.engine import memory, policy_files
from swarm_node.engine.choose import ENGINES, EngineOptions
from swarm_node.engine.client import EngineClient, open_engine
from tests.swarm_node.engine.hostile_tokenizers import ENCODING, make_hostile

DEADLINE_S = 300.0
AGENT_MAX_BYTES = 64 * limits.MIB
"""The bytes by which the agent may grow, whatever comes."""

CHILD_MAX_BYTES = policy_files.MEMORY_MAX_BYTES + 512 * limits.MIB
"""The bytes that the child may have at any time: the library's share, and what it is without a tokenizer."""

ONE_OF_EACH_KIND = {
    "normalizer Replace",
    "normalizer Replace, backtracking",
    "normalizer Prepend",
    "normalizer Sequence, nested",
    "pre-tokenizer Split, backtracking",
    "post-processor TemplateProcessing",
    "padding to a fixed length",
    "truncation into many pieces",
    "model BPE, long merges",
    "model WordLevel, a huge vocabulary",
    "model Unigram, long pieces",
    "added tokens, normalized",
    "the file itself",
}
"""The other attacks are slow: they meet the same limits of the kernel, and change with the library alone."""

ATTACKS = [pytest.param(name, marks=() if name in ONE_OF_EACH_KIND else pytest.mark.slow) for name in ENCODING]

COMMAND = ENGINES["llama"].command(EngineOptions())


def test_every_part_of_the_library_is_tried() -> None:
    """One that a new release brings is missed here, until somebody finds what it amplifies."""
    assert ENCODING.keys() >= ONE_OF_EACH_KIND
    tried = " ".join(ENCODING)
    rooms = (normalizers, pre_tokenizers, processors, models)
    parts = {
        name
        for room in rooms
        for name, part in vars(room).items()
        if isinstance(part, type) and name not in ("Normalizer", "PreTokenizer", "PostProcessor", "Model")
    }
    assert len(parts) > 30
    assert not {name for name in parts if name not in tried}


class Watch:
    """The memory of this process and of its child, as often as anything else happens."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self.started = memory.resident_bytes(os.getpid()) or 0
        self.agent = self.child = self.beats = 0

    async def run(self) -> None:
        while True:
            self.agent = max(self.agent, (memory.resident_bytes(os.getpid()) or 0) - self.started)
            self.child = max(self.child, (self._engine.pid and memory.resident_bytes(self._engine.pid)) or 0)
            self.beats += 1
            await trio.sleep(0.01)  # the pause between two looks


async def attacked(folder: Path, sound: Path) -> tuple[str, Watch]:
    """Return what the agent was told of a hostile version, and what that took; the next version works."""
    said = ""
    async with open_engine(COMMAND) as engine, trio.open_nursery() as nursery:
        watch = Watch(engine)
        nursery.start_soon(watch.run)
        with trio.fail_after(DEADLINE_S):
            await engine.load(folder, 1)
            try:
                await engine.encoded([stand_in("arithmetic", 0)])
            except EngineFailed as error:
                said = str(error)
            await engine.load(sound, 2)
            assert len(await engine.encoded([stand_in("arithmetic", 0)])) == 1
        nursery.cancel_scope.cancel()
    return said, watch


@pytest.mark.trio
@pytest.mark.parametrize("name", ATTACKS)
async def test_a_tokenizer_that_amplifies_a_text_costs_the_agent_nothing(
    name: str, policy: Path, tmp_path: Path
) -> None:
    said, watch = await attacked(make_hostile(tmp_path / "hostile", policy, name), policy)
    assert watch.agent < AGENT_MAX_BYTES
    assert watch.child < CHILD_MAX_BYTES
    assert not said or "tokenizer" in said, said
    assert watch.beats > 10, "the agent went on meanwhile"
