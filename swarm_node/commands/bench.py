"""`swarm-node bench`: measure this machine's sampling speed, before it joins or between two rounds.

- A round is measured with the newest version in this home, its task and its sampler; nothing is downloaded, and the
  coordinator is not contacted.
- A policy folder is measured with the settings of the command line.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from protocol.errors import ConfigInvalid
from protocol.policy.manifest import Sampler, open_manifest
from protocol.text.plain import counted
from swarm_node.coordinator_api.join_string import POLICIES, TRUST_FILE, JoinString, round_folder
from swarm_node.engine.client import Choose, open_engine
from swarm_node.engine.throughput import SampleWork, Throughput, measure
from swarm_node.versions import assemble
from swarm_node.versions.updater import saved


class Subject(NamedTuple):
    """A policy with the task and the sampler of its round."""

    folder: Path
    task: str
    sampler: Sampler


def newest_held_version(home: Path, join: JoinString) -> Subject:
    """Return the newest version of a round that this home holds."""
    folder = round_folder(home, join)
    documents = saved(folder / TRUST_FILE)
    if documents is not None and documents.manifest is not None:
        manifest = open_manifest(documents.manifest, round_id=join.round_id, version=documents.policy_version)
        if policy := assemble.find(folder / POLICIES, manifest):
            return Subject(policy, manifest.task, manifest.sampler)
    raise ConfigInvalid(f"{home} holds no version of this round.", hint="Join it once, or name a policy folder.")


def speed_text(measured: Throughput) -> str:
    """Return a measurement as sentences; the total may be above both of its parts."""
    said = (
        f"{measured.tokens_per_s:,.0f} tokens per second, over {counted(measured.tokens, 'token')}. "
        f"Prompts are read at {measured.prompt_tokens_per_s:,.0f} tokens per second. Completions are continued at "
        f"{measured.decoded_tokens_per_s:,.0f}."
    )
    if measured.tokens_per_s <= measured.decoded_tokens_per_s:
        return said
    return f"{said} The first token of a completion comes with its prompt, and counts in the total only."


async def run(
    subject: Subject,
    command: Sequence[str] | Choose,
    *,
    groups: int,
    samples: int,
    batches: int,
    on_group: Callable[[], None],
) -> Throughput:
    """Sample `batches` batches of groups as a node would, after one batch that does not count."""
    sampler = subject.sampler
    work = SampleWork(subject.task, groups * batches, samples, sampler.max_new_tokens, sampler.temperature)
    async with open_engine(command) as engine:
        await engine.load(subject.folder, 1)
        requests = await work.requests(engine, 1)
        await measure(engine, requests[:groups], at_once=groups, on_group=on_group)
        return await measure(engine, requests, at_once=groups, on_group=on_group)
