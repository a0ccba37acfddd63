"""`swarm-node status`, `pause`, `open`, `limits` and the like: the owner's control of a running agent, and its page."""

import getpass
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from protocol.text.commands import lesson, with_option_groups
from protocol.text.money import unitless_price
from protocol.text.plain import number_text
from swarm_node.commands.options import DEFAULT_HOME, AsJson, CardOption, Home, LimitOptions

if TYPE_CHECKING:
    from swarm_node.allowance.settings import Limits
    from swarm_node.machine.gpu import Card


LIMITS_COLUMNS = 120
"""Width of the table of limits without a terminal."""

RoundArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="ROUND",
        help="One round of an agent in several: its address as `status` prints it, its join string, or the start of "
        "its id. Without it, all rounds.",
    ),
]

EXIT_CODES = "Exit codes: 0 done, 1 failed or no agent is running, 2 wrong usage."
OPEN_EXIT_CODES = "Exit codes: 0 done, 1 no agent is running or it has no page, 2 wrong usage."
LIMITS_EXIT_CODES = "Exit codes: 0 done, also without a running agent; 1 failed, 2 wrong usage."


def status(home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """Show what the agent does, its earnings, and why it is idle; without an agent, why the last one ended."""
    import trio

    from swarm_node.base.clock import now_ms
    from swarm_node.owner import status_lines, stopped
    from swarm_node.owner.control_socket import NoAgent, ask, is_in_use

    try:
        _show(trio.run(ask, home, "status"), as_json)
    except NoAgent as error:
        in_between = is_in_use(home)  # it starts or stops: what the one before it left is no answer
        if in_between and not as_json:
            raise
        last = None if in_between else stopped.last(home)
        if as_json:
            typer.echo(json.dumps({**error.to_wire(), "stopped": last}))
        else:
            typer.echo("\n".join(status_lines.of_stopped(error.message, last, now_ms=now_ms())))
        raise typer.Exit(1) from None


def pause(
    round_name: RoundArgument = None, card: CardOption = None, home: Home = DEFAULT_HOME, as_json: AsJson = False
) -> None:
    """Pause at once and free the memory: open leases are returned; uploads to peers continue.

    With a round only its work pauses, and the agent works for the others. With --card only this card pauses, and the
    other cards continue its work.
    """
    said = f"Paused. Run `swarm-node resume{_where(round_name, card)}` to continue."
    _order("pause", home, as_json, said, card=card, round_name=round_name)


def snooze(
    minutes: Annotated[
        float, typer.Argument(metavar="MINUTES", min=1, max=7 * 24 * 60, help="Minutes until work continues by itself.")
    ],
    round_name: RoundArgument = None,
    card: CardOption = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Pause for some minutes, as `pause` does; work continues by itself."""
    said = f"Paused for {minutes:g} min. Run `swarm-node resume{_where(round_name, card)}` to continue earlier."
    _order("pause", home, as_json, said, card=card, minutes=minutes, round_name=round_name)


def resume(
    round_name: RoundArgument = None, card: CardOption = None, home: Home = DEFAULT_HOME, as_json: AsJson = False
) -> None:
    """Continue after `pause`, `snooze` or `finish`, as far as the limits allow.

    Without a round or card, everything resumes. A pause of the whole agent ends only so.
    """
    _order(
        "resume", home, as_json, "Resumed. The node works when its limits allow it.", card=card, round_name=round_name
    )


def finish(round_name: RoundArgument = None, home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """Accept no more work; the agent stops when the current groups are sampled and sent.

    With a round the agent leaves only this one, and works for the others until it starts again.
    """
    what = f"leaves {round_name}" if round_name else "stops"
    said = f"Finishing: the agent {what} when the current groups are sampled and sent."
    _order("finish", home, as_json, said, round_name=round_name)


def leave(round_name: RoundArgument = None, home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """Stop the agent now: finished work is sent, open leases are returned.

    With a round the agent leaves only this one, and works for the others until it starts again.
    """
    what = f"Leaving {round_name}" if round_name else "Stopping"
    _order("leave", home, as_json, f"{what}: unfinished work is returned to the coordinator.", round_name=round_name)


@with_option_groups
def limits(
    *,
    home: Home = DEFAULT_HOME,
    changes: LimitOptions,
    card: Annotated[
        int | None, typer.Option(min=0, help="Change the limits of this card only: hours, celsius, power-watts.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads of the engine; 0: the value of `join --threads`.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show or change this node's limits; a running agent applies changes within seconds.

    The limits are kept in limits.toml in the home. With --card they hold for one graphics card, in addition to those
    of the node. --vram-share, --turns-mib and --threads take effect at the next start. While a limit holds, the agent
    stays and fetches versions, and `status` names the limit. A mirror obeys --upload-gb only.
    """
    from swarm_node.allowance import settings
    from swarm_node.keys import identity

    named = changes.typed() | ({} if threads is None else {"threads": threads})
    before = settings.read(home)
    current = settings.changed(home, named, card=card)
    if named:
        settings.write(home, current)
    if as_json:
        typer.echo(current.model_dump_json())
        return
    columns = shutil.get_terminal_size((LIMITS_COLUMNS, 24)).columns
    typer.echo("\n".join(changed_lines(before, current, card) if named else limit_lines(current, columns)))
    typer.echo(
        f"Saved in {home / settings.FILE}; a running agent applies it within seconds."
        if named
        else str(home / settings.FILE)
    )
    if not (home / identity.FILE).exists():
        typer.echo(
            f"No node in {home} yet. The next `join` with this folder applies these limits; --home selects another."
        )
    if any(own.power_watts or own.celsius for own in (current, *current.cards.values())):
        from swarm_node.machine.gpu import find_cards

        for line in sensor_lines(current, find_cards().cards):
            typer.echo(line)
    if named.keys() & {"vram_share", "turns_mib", "threads"}:
        typer.echo("vram_share, turns_mib and threads apply from the next start of the agent.")


def sensor_lines(current: "Limits", cards: "Sequence[Card]") -> "Iterator[str]":
    """Yield what holds for limits of power and heat: without a sensor they have no effect."""
    for name, quantity, sensed in (("power_watts", "power", "watts"), ("celsius", "temperature", "celsius")):
        is_set = any(getattr(own, name) for own in (current, *current.cards.values()))
        if is_set and all(getattr(card, sensed) is None for card in cards):
            yield f"{name} has no effect on this machine: no graphics card reports its {quantity}."
        elif is_set and name == "power_watts":
            yield "power_watts holds for the mean over minutes, by pauses." + (
                f" A hard limit needs root: `nvidia-smi -pl {current.power_watts:.0f}`."
                if current.power_watts and any(card.vendor == "nvidia" for card in cards)
                else ""
            )


def limit_lines(current: "Limits", columns: int) -> "Iterator[str]":
    """Yield a row for each limit, with its meaning, and a row for each card that has limits of its own."""
    for name, field in type(current).model_fields.items():
        if name != "cards":
            start = f"{name:<15} {limit_text(name, getattr(current, name)):<16} "
            about = str(field.description)
            yield from textwrap.wrap(start + about, max(columns, 60), subsequent_indent=" " * len(start)) or [start]
    for number, own in sorted(current.cards.items(), key=lambda item: int(item[0])):
        if values := own.model_dump(exclude_defaults=True):
            own_texts = (f"{name} {limit_text(name, value)}" for name, value in values.items())
            yield f"card {number:<10} {', '.join(own_texts)}"


def changed_lines(before: "Limits", after: "Limits", card: int | None) -> "Iterator[str]":
    """Yield a line for each limit of the node or of a card that was changed."""
    from swarm_node.allowance.settings import CardLimits

    old, new = (limits if card is None else limits.cards.get(str(card), CardLimits()) for limits in (before, after))
    where = "" if card is None else f"card {card}: "
    rows = [
        (name, getattr(old, name), getattr(new, name))
        for name in type(new).model_fields
        if name != "cards" and getattr(old, name) != getattr(new, name)
    ]
    for name, was, now in rows:
        yield f"{where}{name} is now {limit_text(name, now)}, was {limit_text(name, was)}"
    if not rows:
        yield f"{where}nothing changed: the limits had these values already"


def limit_text(name: str, value: str | float | bool) -> str:
    """Return a limit's value: a price with its amount in the unit, and a dash for an empty text."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value or "–"
    text = number_text(value)
    return f"{text} ({unitless_price(int(value))})" if name == "price_floor" and value else text


def _where(round_name: str | None, card: int | None) -> str:
    """Return the arguments that limit an order to a round or a card."""
    return f" {round_name}" if round_name else "" if card is None else f" --card {card}"


def _order(do: str, home: Home, as_json: bool, said: str, **options: float | str | None) -> None:
    import trio

    from swarm_node.owner.control_socket import ask

    reply = trio.run(partial(ask, home, do, **options))
    typer.echo(json.dumps(reply) if as_json else said)


def _show(snapshot: dict[str, Any], as_json: bool) -> None:
    from swarm_node.owner import status_lines

    typer.echo(json.dumps(snapshot) if as_json else "\n".join(status_lines.of_status(snapshot)))


def open_page(
    home: Home = DEFAULT_HOME,
    browser: Annotated[bool, typer.Option(help="Open a browser; with --no-browser only print the address.")] = True,
    as_json: AsJson = False,
) -> None:
    """Open the page of the running agent in a browser: state, earnings, limits, pause for each card, receipts, log.

    The page is only for this machine and for you. The printed address opens it once, within ten minutes; run the
    command again for another one. In an SSH session the command prints how to reach the page from your own computer.
    """
    import trio

    from swarm_node.base.clock import now_ms
    from swarm_node.owner.control_socket import ask
    from swarm_node.owner.page.access import TOKEN_LIFE_MS, read_key

    trio.run(ask, home, "status")  # else the file may be one that a killed agent has left
    key = read_key(home)
    address = f"{key.address}?token={key.make_token(now_ms())}"
    if as_json:
        typer.echo(json.dumps({"address": address, "expires_ms": now_ms() + TOKEN_LIFE_MS}))
        return
    tunnel = find_tunnel(os.environ, key.port, getpass.getuser())
    if tunnel:
        typer.echo(f"This is an SSH session. On your own computer run:\n\n    {tunnel}\n\nThen open there:\n")
        typer.echo(f"    {address}\n")
    else:
        typer.echo(address)
    typer.echo("This address works once, within ten minutes.", err=True)
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    if browser and not tunnel and may_start_browser(os.environ, sys.platform, is_root=is_root):
        import webbrowser

        if not webbrowser.open(address):
            typer.echo("No browser was found: open the address by hand.", err=True)


def find_tunnel(environment: Mapping[str, str], port: int, user: str) -> str:
    """Return the command that forwards the page to the computer of an SSH client; empty outside of SSH."""
    parts = environment.get("SSH_CONNECTION", "").split()
    if len(parts) != 4:
        return ""
    _, _, host, ssh_port = parts
    option = "" if ssh_port == "22" else f" -p {ssh_port}"
    return f"ssh -N -L {port}:127.0.0.1:{port}{option} {user}@{host}"


def may_start_browser(environment: Mapping[str, str], platform: str, *, is_root: bool) -> bool:
    """Return True on a desktop: elsewhere a browser for terminals would start; root's browser would be a risk."""
    has_display = any(environment.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "WSL_DISTRO_NAME", "BROWSER"))
    return not is_root and (platform in ("darwin", "win32") or has_display)


def add_to(app: typer.Typer) -> None:
    """Add these commands to the program."""
    for command, example, then in (
        (status, "swarm-node status", "`why` explains single leases, `earnings` shows your credit."),
        (pause, "swarm-node pause", "`resume` continues; `leave` stops the agent."),
        (snooze, "swarm-node snooze 60 --card 1", "`resume` continues earlier; `status` shows until when it rests."),
        (resume, "swarm-node resume", "`status` shows whether the limits allow work now."),
        (finish, "swarm-node finish", "run `resume` before the agent stops to cancel this."),
        (leave, "swarm-node leave", "run `join` to continue with the same key and earnings."),
        (
            limits,
            "swarm-node limits --hours 22:00-07:00 --upload-gb 200",
            "`status` shows when a limit prevents work.",
        ),
    ):
        codes = LIMITS_EXIT_CODES if command is limits else EXIT_CODES
        app.command(epilog=lesson(example, then, codes))(command)
    then = "`status --json` has the same figures for scripts, and the page has them at status.json."
    app.command("open", epilog=lesson("swarm-node open", then, OPEN_EXIT_CODES))(open_page)
