"""`swarm-node audit-learner`: replay updates of a round's learner, as the public log and files have them.

- The log is verified whole first: the chain of updates is part of that.
- Updates are replayed by `swarm-coordinator audit update`, the learner's own code, in a process with limits of memory
  and time: it reads weights and configuration that strangers serve.
"""

import importlib.util
import json
import random
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from protocol.errors import ConfigInvalid, EngineFailed, ProofInvalid
from protocol.text.plain import counted
from swarm_node.commands.options import DEFAULT_HOME, HomeOfRound, JoinText

if TYPE_CHECKING:
    from swarm_node.coordinator_api.join_string import JoinString
    from swarm_node.ledger.log_reader import PublicFiles
    from swarm_node.ledger.log_verify import ReadLog

EXIT_CODES = "Exit codes: 0 all match, 1 an update or its files do not match the log, 2 wrong usage, 3 no verdict."

NO_VERDICT = 3

MISMATCH = 4
"""Exit code of `swarm-coordinator audit update` for an update that does not match."""

BATCH_COPIES = 8
"""A batch in memory: received, as bytes, decoded, encoded again for its root, and small values."""

REPLAY_MAX_S = 12 * 3600.0
"""A processor takes minutes for an update of a small policy, and hours for a large one."""


def audit_learner(
    join_string: JoinText = "",
    *,
    update: Annotated[int | None, typer.Option(min=1, help="Number of the update to replay.")] = None,
    count: Annotated[
        int | None, typer.Option("--random", min=1, help="Number of updates to choose at random among those drawn.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Keep the files in this folder, for others to repeat the replay.")
    ] = None,
    home: HomeOfRound = DEFAULT_HOME,
) -> None:
    """Replay updates of the learner bit for bit, and compare their states with the roots in the public log.

    The log draws which updates can be replayed. Needs torch, and a processor or card like the learner's.
    """
    import trio

    from swarm_node.commands.targets import the_only
    from swarm_node.coordinator_api import last_round

    if (update is None) == (count is None):
        raise ConfigInvalid("Give either --update or --random.", hint="For example: --random 1")
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        raise ConfigInvalid("A replay needs torch.", hint="pip install 'echo-swarm[learner]'")
    join = the_only(last_round.all_chosen(join_string, home), "a replay")
    with ExitStack() as stack:
        place = save or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="echo-swarm-updates-")))
        folders = trio.run(_fetch, join, update, count, place, typer.echo)
        if not folders:
            typer.echo(
                "No verdict: the log has drawn no update, so none can be replayed. The operator chooses how many are "
                "drawn (learner.kept_one_in). `ledger verify` checks the chain of updates."
            )
            raise typer.Exit(NO_VERDICT)
        typer.echo(f"replaying {counted(len(folders), 'update')}; each takes minutes, or hours for a large policy")
        codes = [replay(folder, typer.echo) for folder in folders]
    if MISMATCH in codes:
        raise ProofInvalid(
            f"{counted(codes.count(MISMATCH), 'update')} of {len(codes)} did not match the log.",
            hint="Publish the folder and this output: `swarm-coordinator audit update FOLDER` repeats it anywhere."
            if save
            else "Repeat with --save FOLDER, and publish the folder: anyone can repeat the replay with it.",
        )
    if any(codes):
        raise typer.Exit(NO_VERDICT)
    typer.echo(f"Verified: {counted(len(codes), 'update')} replayed, each to the state that the log has.")
    typer.echo("This does not prove that rewards were right before their batch was formed, or whose nodes worked.")


async def _fetch(
    join: "JoinString", update: int | None, count: int | None, place: Path, say: Callable[[str], None]
) -> list[Path]:
    """Verify the log, choose the updates, and fetch a folder for each."""
    import httpx

    from ledger.witness import Witnesses
    from swarm_node.coordinator_api.origin import COORDINATORS, PLAIN, Origin
    from swarm_node.ledger import learner_audit, log_verify
    from swarm_node.ledger.log_reader import LogReader

    async with httpx.AsyncClient(timeout=COORDINATORS.silence_s, headers=PLAIN, follow_redirects=False) as client:
        files = Origin(f"{join.url}/v1", client, COORDINATORS)
        say(f"verifying the log of {join.url}, which takes a minute for a long one")
        log = log_verify.ReadLog()
        result = await log_verify.verify(LogReader(files), join.round_id, Witnesses(), lambda *_: None, log)
        say(
            f"the log of {join.url} is sound: {counted(result.entries, 'entry', 'entries')}, "
            f"signed root {result.root[:16]}…"
        )
        folders = []
        for number in await choose(files, log, update, count):
            folder = place / f"update-{number}"
            fetched = await learner_audit.fetch(files, log, number, folder, say, batch_max_bytes=_batch_max_bytes())
            if fetched.unsigned:
                say(
                    f"{counted(fetched.unsigned, 'group')} of {fetched.groups} were made by several nodes: not compared"
                )
            folders.append(folder)
    return folders


async def choose(files: "PublicFiles", log: "ReadLog", update: int | None, count: int | None) -> list[int]:
    """Return the updates to replay: the one that is named, or some of those that were drawn; none if none was."""
    from swarm_node.ledger import learner_audit

    if not log.training.updates:
        raise ConfigInvalid("The log has no updates of a learner yet.", hint="Try again after the first update.")
    drawn = await learner_audit.drawn(files, log)
    if drawn and update is not None and update not in drawn:
        hint = f"The newest updates that were drawn: {', '.join(map(str, drawn[-20:]))}."
        last = max(log.training.updates)
        if update > last:
            raise ConfigInvalid(f"The log has no update {update} yet: the newest is {last}.", hint=hint)
        raise ConfigInvalid(f"The log has not drawn update {update}.", hint=hint)
    if not drawn:
        return []
    return [update] if update is not None else sorted(random.SystemRandom().sample(drawn, min(count or 1, len(drawn))))


def _batch_max_bytes() -> int:
    """Return the most bytes of a batch that this machine's free memory can hold decoded."""
    from protocol import limits
    from swarm_node.machine import use

    free = use.memory_bytes()[1]
    return limits.KEPT_BATCH_MAX_BYTES if free is None else min(limits.KEPT_BATCH_MAX_BYTES, free // BATCH_COPIES)


def replay(folder: Path, say: Callable[[str], None]) -> int:
    """Run the replay of a folder; return its exit code, or `NO_VERDICT` if it exceeded the limits of this machine."""
    from swarm_node.engine import memory
    from swarm_node.machine import use

    program = Path(sys.executable).with_name("swarm-coordinator")
    size_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    allowed = memory.allowed_bytes(size_bytes, use.memory_bytes()[1], ranks=ranks_of(folder))
    command = [str(program), "audit", "update", str(folder)]
    try:
        return memory.run_within(command, allowed_bytes=allowed, seconds_max=REPLAY_MAX_S)
    except EngineFailed as error:
        say(f"no verdict: {error.message}")
        return NO_VERDICT


def ranks_of(folder: Path) -> int:
    """Return the number of ranks that made the updates of a folder, by their settings; 1 if those are malformed."""
    try:
        return int(json.loads((folder / "settings.json").read_bytes())["processes"])
    except (OSError, LookupError, TypeError, ValueError, OverflowError, RecursionError):
        return 1
