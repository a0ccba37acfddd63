"""`swarm-coordinator retract`: train again without the groups of banned owners, and publish the result.

    plan → replay beside the learner → hold: no batch is formed → the last batches → order → the learner goes on from it

- The replay reads the store and the learner's folder, and writes only into a folder of its own. The round goes on.
- Only the order changes the round; the coordinator carries it out, or this command where no coordinator runs.
- A replay that was interrupted anywhere continues with the same command.
- If several ranks train the round's policy, as many processes of this command replay: rank 0 does all that one process
  would do, and the others train with it. The command itself plans, starts them, and waits.
"""

import asyncio
import fcntl
import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.commands.asking import ask, launched
from coordinator.commands.options import AsJson, ConfigFile, Settings
from coordinator.config import Config, fixed, load
from protocol.errors import ConfigInvalid, NotFound, OutOfOrder
from protocol.text.plain import counted, duration_text

if TYPE_CHECKING:
    from coordinator.audit.case import RoundArchive
    from coordinator.learner.retracting import SideBranch
    from coordinator.rules.retraction import RetractionPlan
    from coordinator.transactions.retractions import RetractionResult

ORDER_S = 3600.0
"""Longest wait for a publication: cutting, hashing and syncing the largest policies."""

HOLD_WITHIN = 2
"""The replay is this many batches behind the newest, or fewer, when no more batches are formed."""

HOLD_S = 120.0
"""The shortest hold. It is prolonged before each update, and ends by itself if this command is killed."""

FAILED = 1
"""Exit code of a retraction that was not carried out."""

HOLD_UPDATES = 3
"""The hold in updates, of the longest so far."""


def retract(
    config_file: ConfigFile,
    owners: Annotated[
        list[str], typer.Argument(metavar="OWNER...", help="The owner's id, or the id or name of one of the nodes.")
    ],
    settings: Settings,
    reason: Annotated[str, typer.Option(help="Reason; everybody sees it.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be trained again, and stop.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train again without the groups of banned owners, from the last checkpoint before the first, and publish it.

    The round goes on meanwhile; after a kill, the same command continues. Credits do not change. Needs torch and the
    round's folder with the learner's.
    """
    from coordinator.audit.case import RoundArchive
    from coordinator.base.children import leave_with_parent
    from coordinator.learner import launch
    from coordinator.learner.retracting import remove_done
    from coordinator.store.facts import FINISHED, get_fact

    config = launched(load(config_file, settings))
    if launch.is_launched():
        leave_with_parent(launch.LOST)
        if not launch.is_first():
            _follow(config)
            return
    else:
        launch.forget_ranks()
    fixed.require_round(config.round.directory)
    _require_replayable(config)
    if not dry_run and not reason:
        raise ConfigInvalid("A retraction needs a reason.", hint="Add --reason 'TEXT', or --dry-run for the plan only.")
    say = _silent if as_json else typer.echo
    with closing(RoundArchive(config)) as archive:
        if archive.read(get_fact, FINISHED):
            raise OutOfOrder("The round is finished: its learner takes no other policy any more.")
        wanted = _owners(archive, owners)
        _require_learner_folder(config)
        found = make_plan(config, archive, wanted)
        if found is None and launch.is_launched():
            raise OutOfOrder("The groups of these owners were left out meanwhile.", hint="Repeat the command.")
        if found is None:
            remove_done(config.round.directory / "learner", wanted)
            _print(
                {"changed": False}, "None of these owners' groups had an effect on the policy. Nothing to do.", as_json
            )
            return
        described = describe(archive, found)
        if dry_run and as_json:
            typer.echo(json.dumps(described))
        for line in () if launch.is_launched() else lines(config, archive, found, described):
            say(line)
        if found.start is None:
            raise _nothing_clean(found)
        if dry_run:
            return
        if not launch.is_launched():
            require_room(config)
            if config.learner.processes > 1:
                carry_out_by_ranks(config.learner.processes)
                return
        with _alone(config), launch.ending_with_others():
            version = _carry_out(config, archive, wanted, found, reason, say)
    _print(
        {"changed": True, "version": version, **described},
        f"Version {version} is published: the policy without these groups. The learner goes on from it.",
        as_json,
    )


def _silent(_text: str) -> None:
    """Print nothing."""


def _print(values: dict[str, Any], text: str, as_json: bool) -> None:
    typer.echo(json.dumps(values) if as_json else text)


def _require_replayable(config: Config) -> None:
    """Refuse a round whose updates this command cannot make again."""
    if config.learner.external:
        raise ConfigInvalid(
            "This round's updates are made by trainers of others (learner.external): only they can make them again.",
            hint="Train a clean policy with that trainer, and publish it.",
        )


def _require_learner_folder(config: Config) -> None:
    """Refuse a machine without the states and batches that the replay begins from."""
    if not (config.round.directory / "learner" / "start").is_dir():
        raise ConfigInvalid(
            f"The learner's folder is not in {config.round.directory}.",
            hint="A learner on another machine cannot load the result: run it here, with a copy of its folder. "
            "A learner that was just started makes it within a minute.",
        )


def _owners(archive: "RoundArchive", texts: list[str]) -> tuple[str, ...]:
    """Return the owners that are named; refuse one that is not banned, as its groups would be trained on again."""
    from coordinator.reports import moderation
    from coordinator.transactions import standings

    found = {archive.read(moderation.find_owner, text): text for text in texts}
    for owner, text in found.items():
        if archive.read(standings.banned_ms, owner) is None:
            raise ConfigInvalid(
                f"{text} is not banned, so the next batches would train on this owner's groups again.",
                hint=f"First: swarm-coordinator nodes ban ROUND {text} --reason 'TEXT'",
            )
    return tuple(sorted(found))


def make_plan(config: Config, archive: "RoundArchive", owners: tuple[str, ...]) -> "RetractionPlan | None":
    """Return the plan from the store and the learner's folder; None if the policy is clean."""
    from coordinator.learner.retracting import begun, kept_states
    from coordinator.rules import retraction
    from coordinator.service.publication import newest_replacement
    from coordinator.transactions import retractions

    earlier = archive.read(retractions.earlier_retractions)
    everybody = {*owners, *(owner for each in earlier for owner in each.owners)}
    groups = archive.read(retractions.owned_groups, everybody)
    learner = config.round.directory / "learner"
    interrupted = begun(learner, owners)
    return retraction.plan(
        retraction.to_leave_out(groups, owners, earlier),
        [*kept_states(learner), *([interrupted] if interrupted else [])],
        earlier,
        sizes=archive.read(retractions.batch_sizes),
        version=archive.read(newest_replacement),
        chosen=archive.read(retractions.last_chosen),
    )


def describe(archive: "RoundArchive", found: "RetractionPlan") -> dict[str, Any]:
    """Return the figures of a plan."""
    from coordinator.rules.retraction import named_owners
    from coordinator.transactions import retractions

    update_s = archive.read(retractions.update_s)
    claims = [group.claim_id for group in found.left_out]
    return {
        "owners": named_owners(found.left_out),
        "first_trained": found.first_trained,
        "start": found.start.update if found.start else None,
        "last": found.last,
        "updates": found.updates,
        "emptied": list(found.emptied),
        "left_out": len(claims),
        "left_out_tokens": archive.read(retractions.tokens_of, claims),
        "seconds": None if update_s is None else round(found.updates * update_s, 1),
    }


def lines(config: Config, archive: "RoundArchive", found: "RetractionPlan", described: dict[str, Any]) -> Iterator[str]:
    """Yield a plan as lines."""
    from coordinator.transactions import retractions

    yield f"Update {found.first_trained:,} was the first to train on their groups."
    if found.start is None:
        return
    where = "the starting policy" if found.start.is_start else f"the checkpoint after update {found.start.update:,}"
    yield f"The last clean state that is kept is {where}."
    yield (
        f"Updates {found.start.update + 1:,} to {found.last:,} are made again without "
        f"{counted(described['left_out'], 'group')} of {described['left_out_tokens']:,} tokens."
    )
    for owner, count in sorted(Counter(owner for group in found.left_out for owner in group.owners).items()):
        yield f"  {owner}: {counted(count, 'group')}"
    if found.emptied:
        yield f"{counted(len(found.emptied), 'update')} had no other groups, and will change nothing."
    if described["seconds"] is not None:
        yield (
            f"This takes about {duration_text(described['seconds'])}: {counted(found.updates, 'update')} at the "
            "learner's pace, and longer if the learner trains on the same device meanwhile."
        )
    changed = archive.read(retractions.settings_digests, found.start.update + 1, found.last)
    if len(changed) > 1:
        updates = ", ".join(f"{update:,}" for update in list(changed.values())[1:])
        yield f"Note: the learner's settings changed with update {updates}. The replay has today's for all updates."
    if not config.learner.kept_checkpoints and found.start.is_start:
        yield "Note: with learner.kept_checkpoints, later checkpoints are kept, and less is made again."


def _nothing_clean(found: "RetractionPlan") -> NotFound:
    return NotFound(
        f"No state from before update {found.first_trained:,} can be used: since then, an order put other weights in "
        "the place of the learner's state.",
        hint="Publish the weights of a version that is older than that with `policy rollback` or `policy publish`.",
    )


@contextmanager
def _alone(config: Config) -> Iterator[None]:
    """Raise an error if another retraction of this round is under way."""
    from coordinator.base.files import open_private

    with open_private(config.round.directory / "retract.lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutOfOrder("A retraction of this round is under way.", hint="Wait until it has ended.") from None
        yield


def require_room(config: Config) -> None:
    """Refuse a replay for which this machine lacks memory or disk beside what runs on it, the learner included."""
    from coordinator.learner import preflight

    try:
        preflight.require_fits(config, replay=True)
    except ConfigInvalid as error:
        raise ConfigInvalid(
            f"The replay does not fit beside what runs on this machine. {error}",
            hint="Stop the round, and repeat the command: it works without the coordinator. For the disk, free space.",
        ) from None


def _carry_out(
    config: Config, archive: "RoundArchive", owners: tuple[str, ...], found: "RetractionPlan", reason: str, say: Any
) -> int:
    """Make the updates again up to the newest batch, and publish the result; return its version."""
    from coordinator.learner.ranks import Ranks
    from coordinator.learner.retracting import SideBranch
    from coordinator.model.watchdog import Watchdog
    from coordinator.transactions.leases import latest_batch
    from coordinator.transactions.orders import whoami

    assert found.start
    branch = SideBranch(config, Ranks(config.learner.device, Watchdog(config.learner.watchdog_s)), found.start, owners)
    if branch.continues:
        say(f"The replay continues after update {branch.update:,}.")
    replay = _Replay(config, archive, owners, branch, say)
    version = 0
    try:
        while not version:
            replay.catch_up()
            made, stage = replay.result(found.start.update + 1)
            wanted = {"action": "retract", "stage": stage.name, "reason": reason, "given_by": whoami()}
            try:
                version = _publish(config, wanted | {"retraction": made.model_dump(mode="json")})
            except OutOfOrder:
                if archive.read(latest_batch) == made.last:
                    raise
                say("A batch was formed before the result was published. The replay goes on.")
            finally:
                shutil.rmtree(stage, ignore_errors=True)
    except BaseException:
        replay.release()
        raise
    branch.remove()
    return version


def carry_out_by_ranks(processes: int) -> None:
    """Carry out this command by as many processes as train the policy, and wait for them."""
    from coordinator.base.children import WRONG_SETTING, script
    from coordinator.learner import launch

    ended = launch.run_quietly([script("swarm-coordinator"), *sys.argv[1:]], processes)
    if ended.failed is None:
        return
    if ended.failed or ended.code > WRONG_SETTING:  # otherwise rank 0 has said why
        typer.echo(
            f"Rank {ended.failed} of {processes} ended with code {ended.code}, and the others with it.", err=True
        )
    raise typer.Exit(FAILED if ended.code == launch.LOST else ended.code)


def _follow(config: Config) -> None:
    """Replay as one of several ranks, directed by rank 0."""
    from coordinator.learner import launch, retracting
    from coordinator.learner.ranks import Ranks
    from coordinator.model.watchdog import Watchdog

    with launch.ending_with_others():
        retracting.follow(config, Ranks(config.learner.device, Watchdog(config.learner.watchdog_s)))


def _publish(config: Config, wanted: dict[str, Any]) -> int:
    """Send the order, or carry it out if no coordinator runs; return the version."""
    from coordinator.service.publication import Replacement

    done = ask(config, "POST", "/v1/operator/versions", wanted, patience_s=ORDER_S)
    if done is None:
        from coordinator.service.round import Round

        with closing(Round(config)) as round_:
            round_.publication.mirror = None  # a running coordinator updates the mirror later
            done = asyncio.run(round_.publication.replace(Replacement.model_validate(wanted)))
    return int(done["version"])


class _Replay:
    """The replay of batches from the store, up to the newest."""

    def __init__(
        self, config: Config, archive: "RoundArchive", owners: tuple[str, ...], branch: "SideBranch", say: Any
    ) -> None:
        self._config, self._archive, self._owners = config, archive, owners
        self._branch, self._say = branch, say
        self._held = False

    def catch_up(self) -> None:
        """Train on batches until none is newer, and see to it that none is formed then."""
        from coordinator.transactions import retractions
        from coordinator.transactions.leases import latest_batch

        gap = None
        while True:
            newest = self._hold() if self._held else self._archive.read(latest_batch)
            behind = newest - self._branch.update
            if not behind and self._held:
                return
            if not self._held and (behind <= HOLD_WITHIN or (gap is not None and behind >= gap)):
                self._held = True
                continue
            gap = behind
            self._archive.read(retractions.require_banned, self._owners)
            self._train_to(newest)

    def result(self, first: int) -> "tuple[RetractionResult, Path]":
        """Write the result; return what the order says of it, and the folder to publish."""
        from coordinator.base.files import make_folder
        from coordinator.rules.retraction import named_owners
        from coordinator.service import publication
        from coordinator.transactions import commitments, retractions
        from ledger.training import groups_root

        uploads = make_folder(self._config.round.directory / "uploads")
        stage = uploads / publication.stage_name()
        replaced = self._archive.read(publication.newest_replacement)
        in_use = self._archive.read(commitments.retraction_to, replaced) if replaced else None
        self._hold()
        root = self._branch.finish(stage, in_use=in_use.after if in_use else "")
        left_out = [group for group in self._left_out() if first <= group.batch <= self._branch.update]
        owners = named_owners(left_out)
        made = retractions.RetractionResult.model_validate(
            {
                "owners": owners,
                "named": sorted({*self._owners} & {*owners}),
                "first": first,
                "last": self._branch.update,
                "before": self._branch.before,
                "after": root,
                "left_out": len(left_out),
                "left_out_root": groups_root(group.claim_id.encode() for group in left_out),
            }
        )
        return made, stage

    def _train_to(self, last: int) -> None:
        from coordinator.transactions import batches

        left_out = {group.claim_id for group in self._left_out()}
        while (number := self._branch.update + 1) <= last:
            if self._held:
                self._hold()
            groups = self._archive.read(batches.groups_of, number)
            rest = tuple(group for group in groups if group.claim_id not in left_out)
            self._branch.train(rest)
            self._say(f"update {number:,} of {last:,} made again, with {len(rest)} of {counted(len(groups), 'group')}")

    def _left_out(self) -> Any:
        from coordinator.rules.retraction import to_leave_out
        from coordinator.transactions import retractions

        earlier = self._archive.read(retractions.earlier_retractions)
        everybody = {*self._owners, *(owner for each in earlier for owner in each.owners)}
        return to_leave_out(self._archive.read(retractions.owned_groups, everybody), self._owners, earlier)

    def release(self) -> None:
        """Let batches be formed again."""
        if self._held:
            ask(self._config, "POST", "/v1/operator/hold", {"for_s": 0})

    def _hold(self) -> int:
        """See to it that no batch is formed for some time; return the newest batch."""
        from coordinator.transactions.leases import latest_batch

        for_s = min(ORDER_S, max(HOLD_S, HOLD_UPDATES * self._branch.longest_s))
        held = ask(self._config, "POST", "/v1/operator/hold", {"for_s": for_s})
        return int(held["batch"]) if held else self._archive.read(latest_batch)
