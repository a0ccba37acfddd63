"""`swarm-node rounds`, `move` and `directory`: find a round, change to another, and publish a list of rounds.

- Listing reads directories only. `--verify` and `--best` ask the rounds themselves, which then see this machine's
  address.
"""

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from protocol.errors import ConfigInvalid
from protocol.limits import PRICE_DEFAULT_MICROS_PER_MTOK
from protocol.text.commands import lesson, with_option_groups
from swarm_node.commands.options import (
    DEFAULT_HOME,
    AsJson,
    BestBy,
    BestOptions,
    ConfirmOptions,
    DirectoryPlaces,
    Home,
    PriceOption,
    WholeSentences,
)

if TYPE_CHECKING:
    from swarm_node.commands.options import EngineChoice
    from swarm_node.ledger.directories import Directories

app = typer.Typer(
    cls=WholeSentences, help="Publish a signed list of rounds.", no_args_is_help=True, add_completion=False
)

EXIT_CODES = "Exit codes: 0 done, 1 failed, 2 wrong usage."

MADE_FOR_DAYS = 7


def rounds(
    *,
    directory: DirectoryPlaces,
    verify: Annotated[
        bool, typer.Option("--verify", help="Ask each round for its log, and check what it says it has paid.")
    ] = False,
    witness: Annotated[
        list[str],
        typer.Option(
            default_factory=list,
            show_default=False,
            metavar="KEY",
            help="Use only directories that this witness has signed; repeatable, and remembered.",
        ),
    ],
    forget_witness: Annotated[
        list[str],
        typer.Option(
            default_factory=list, show_default=False, metavar="KEY", help="Require this witness no more; repeatable."
        ),
    ],
    price: PriceOption = PRICE_DEFAULT_MICROS_PER_MTOK,
    home: Annotated[Path, typer.Option(help="The node's folder, which remembers the directories.")] = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """List the rounds of the directories that you trust: purpose, model, price, payouts, and whether they fit here.

    --directory is remembered for the next time. Amounts are those that each round has signed. --verify reads each
    round's log, which takes a while for a large one; a round whose log proves something else is refused for ever, by
    its own signature.
    """
    import trio

    from swarm_node.base.clock import now_ms
    from swarm_node.commands import finding

    known = _open_directories(home, directory, witness, forget_witness)
    found = trio.run(known.read_all, now_ms())
    asked: dict[str, finding.AskedRound] = {}
    if verify:
        asked = trio.run(finding.verify_all, known, found, price, home)
        found = trio.run(known.read_all, now_ms())
    capacity = finding.here(home).capacity
    if as_json:
        typer.echo(json.dumps(finding.as_json(found, asked, capacity, price)))
        return
    for problem in found.problems:
        typer.echo(f"note: {problem}", err=True)
    typer.echo("\n\n".join(finding.blocks(found, asked, capacity, price)) or "These directories list no round.")


@with_option_groups
def move(
    join_string: Annotated[
        str, typer.Argument(metavar="JOIN_STRING", help="The other round's join string or host; or use --best.")
    ] = "",
    *,
    confirm: ConfirmOptions,
    best: BestOptions,
    price: PriceOption = PRICE_DEFAULT_MICROS_PER_MTOK,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Continue with another round, without losing a lease: the running agent finishes its groups first.

    The agent accepts no more work, samples and sends its current groups, as `finish` does, and then joins the other
    round with the same key and settings. `resume` before that cancels the move. A round that does not respond or is
    finished is refused, and the agent goes on where it is.
    """
    import trio

    from swarm_node.commands import preview
    from swarm_node.commands.targets import round_of
    from swarm_node.coordinator_api.join_string import parse
    from swarm_node.keys import identity
    from swarm_node.ledger.directories import Directories
    from swarm_node.owner.control_socket import ask

    best.require_whole(join_string)
    chosen = choose_best(best, home, price) if best.best else round_of(join_string, home, confirm)
    if not chosen:
        raise ConfigInvalid("`move` needs a join string, or --best.", hint="`swarm-node rounds` lists rounds.")
    join = parse(chosen)
    Directories(home).require_not_refused(join.round_id)
    trio.run(preview.ask_before_move, join, identity.find_identity(home).key)
    reply = trio.run(partial(ask, home, "move", join_string=str(join)))
    said = f"Moving: the agent finishes its groups, then joins {join.url}. `swarm-node resume` cancels it."
    typer.echo(json.dumps(reply) if as_json else said)


@app.command(
    epilog=lesson(
        "swarm-node directory make rounds.json 'JOIN_STRING' 'JOIN_STRING' --name rounds.example.org",
        "put the file on any web server, and publish the printed address; run it again every day.",
        EXIT_CODES,
    )
)
def make(
    out: Annotated[Path, typer.Argument(metavar="FILE", help="The directory's file; the last one is continued.")],
    join_strings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[JOIN_STRING]...", help="Rounds to add; those of the last file stay in it."),
    ] = None,
    *,
    name: Annotated[str, typer.Option(help="Name of the directory, such as your domain.")] = "",
    remove: Annotated[
        list[str],
        typer.Option(default_factory=list, show_default=False, help="Id of a round to forget; repeatable."),
    ],
    days: Annotated[int, typer.Option(min=1, max=31, help="Days for which the file is valid.")] = MADE_FOR_DAYS,
    home: Annotated[Path, typer.Option(help="Folder with the curator's key, witness.key.")] = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Verify rounds by their logs, and write a signed list of them that anybody can host and mirror.

    Each round's log is read completely. A round whose log contradicts what it says of its payouts is listed as refused,
    with the reason. A round that cannot be verified now keeps its last entry until that expires. The file also says
    when you saw which entries and payouts: you are a witness, with the key of `ledger witness`.
    """
    from swarm_node.base.clock import now_ms
    from swarm_node.commands import surveying
    from swarm_node.coordinator_api.join_string import parse
    from swarm_node.keys import identity

    key = identity.load_or_create(home / "witness.key").key
    joins = [parse(text) for text in join_strings or ()]
    made = surveying.make(out, joins, key, name=name, removed=set(remove), days=days, now_ms=now_ms())
    listed = made.directory
    if as_json:
        counts = {"number": listed.number, "rounds": len(listed.rounds), "refused": len(listed.refused)}
        typer.echo(json.dumps(counts | {"key": key.node_id, "said": made.lines}))
        return
    for line in made.lines:
        typer.echo(line)
    typer.echo(f"{out}: number {listed.number} of {listed.name}, valid for {days} days.")
    typer.echo(f"Readers list it with: swarm-node rounds --directory 'URL#{key.node_id}'")


@app.command(
    epilog=lesson(
        "swarm-node directory witness 'https://rounds.example.org/rounds.json#12D3KooW…' rounds.json",
        "give the file to the curator, or publish it yourself; readers use it with `rounds --witness KEY`.",
        EXIT_CODES,
    )
)
def witness(
    place: Annotated[str, typer.Argument(metavar="DIRECTORY", help="The directory, 'URL#KEY' or 'FILE#KEY'.")],
    out: Annotated[Path, typer.Argument(metavar="FILE", help="The file with your signature.")],
    *,
    home: Annotated[Path, typer.Option(help="Folder with your key, witness.key, and what you signed.")] = DEFAULT_HOME,
) -> None:
    """Sign somebody's directory, if it is newer than all of theirs that you have signed.

    Your signature says that you saw this file under its number, and will sign no other one and none that is older. So
    readers who ask for it all see the same rounds. It says nothing about the rounds.
    """
    import trio

    from ledger.directory import add_witness
    from swarm_node.base.clock import now_ms
    from swarm_node.base.disk import write_durably
    from swarm_node.keys import identity
    from swarm_node.ledger.directories import Directories, parse_place

    key = identity.load_or_create(home / "witness.key").key
    known = Directories(home)
    known.witnesses = [other for other in known.witnesses if other != key.node_id]  # its signature is added below
    data = trio.run(known.read_newest, parse_place(place), now_ms())
    signed = json.dumps(add_witness(data, key), ensure_ascii=False, indent=1).encode()
    write_durably(out, signed, temp_folder=out.parent)
    typer.echo(f"{out} has your signature. Readers ask for it with: swarm-node rounds --witness {key.node_id}")


def choose_best(
    best: BestOptions,
    home: Path,
    price: int,
    *,
    ask: bool = True,
    engine: "EngineChoice | None" = None,
    cards: Sequence[int] = (),
) -> str:
    """Return the join string of the best round, once the owner agrees; without `ask`, nothing is joined.

    `engine` and `cards` are the options of `join`; by default, those of a plain `join`.
    """
    import trio

    from swarm_node.commands import finding

    known = _open_directories(home, best.directory)
    can_ask = sys.stdin.isatty() and sys.stderr.isatty()
    if ask and not (best.yes or can_ask):
        raise ConfigInvalid("There is no terminal on which to confirm the round.", hint="Add --yes to join it unasked.")
    chosen = trio.run(
        partial(
            finding.choose,
            known,
            "cause" if best.best is BestBy.CAUSE else "earnings",
            words=best.cause,
            unit=best.unit,
            price=price,
            home=home,
            machine=finding.here(home, engine, cards),
            tell=partial(typer.echo, err=True),
        )
    )
    if ask and not best.yes and not typer.confirm(f"Join {chosen.listing.name}?", default=False, err=True):
        raise ConfigInvalid(
            "The round was not confirmed. Nothing was joined.", hint="`swarm-node rounds` lists others."
        )
    return chosen.listing.join_string


def _open_directories(
    home: Path, places: list[str], witnesses: Sequence[str] = (), forgotten: Sequence[str] = ()
) -> "Directories":
    """Return what the home knows of directories, with new places and witnesses added, and forgotten ones removed."""
    from swarm_node.ledger.directories import Directories, parse_place, parse_witness

    known = Directories(home)
    if forgotten:
        known.forget_witnesses([parse_witness(text) for text in forgotten])
    if witnesses:
        known.require_witnesses([parse_witness(text) for text in witnesses])
    if places:
        known.remember(parse_place(text) for text in places)
    if not known.places:
        raise ConfigInvalid(
            "This home knows no directory of rounds.", hint="Give one with --directory 'URL#KEY', from its curator."
        )
    return known
