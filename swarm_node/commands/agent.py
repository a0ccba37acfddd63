"""`swarm-node status`, `pause`, `resume`, `finish`, `leave` and `limits`: the owner and the agent that runs."""

import json
from typing import Annotated, Any

import typer

from protocol.text.lesson import lesson
from swarm_node.commands.options import (
    DEFAULT_HOME,
    AsJson,
    BatteryOption,
    FloorOption,
    Home,
    HoursOption,
    IdleOption,
    PowerOption,
    UploadOption,
    VramOption,
    ZoneOption,
    given,
)

EXIT_CODES = "Exit codes: 0 done, 1 failed or no agent is running, 2 wrong usage."


def status(home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """What the agent of this home does and has earned, and why it does nothing; without one, why the last ended."""
    import trio

    from swarm_node.owner import status_lines, stopped
    from swarm_node.owner.control_client import ask
    from swarm_node.owner.control_socket import NoAgent
    from swarm_node.owner.snapshot import now_ms

    try:
        _show(trio.run(ask, home, "status"), as_json)
    except NoAgent as error:
        last = stopped.last(home)
        if as_json:
            typer.echo(json.dumps({**error.to_wire(), "stopped": last}))
        else:
            typer.echo("\n".join(status_lines.of_stopped(error.message, last, now_ms=now_ms())))
        raise typer.Exit(1) from None


def pause(home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """Stop at once and free the memory: leases go back, others go on with them. Chunks are still passed on."""
    _order("pause", home, as_json, "Paused. Run `swarm-node resume` to continue.")


def resume(home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """Go on after `pause` or `finish`, as far as the limits allow."""
    _order("resume", home, as_json, "Resumed; the node works as far as its limits allow.")


def finish(home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """Take no more work; the agent ends when what it samples has ended and is sent."""
    _order("finish", home, as_json, "Finishing: the node ends when its running groups are done.")


def leave(home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """End the agent now: leases go back, what is finished is sent first."""
    _order("leave", home, as_json, "Stopping: unfinished work was returned.")


def limits(
    home: Home = DEFAULT_HOME,
    hours: HoursOption = None,
    zone: ZoneOption = None,
    idle_minutes: IdleOption = None,
    on_battery: BatteryOption = None,
    power_watts: PowerOption = None,
    vram_share: VramOption = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of the engine; 0: as `join --threads` says.")] = None,
    upload_gb: UploadOption = None,
    price_floor: FloorOption = None,
    as_json: AsJson = False,
) -> None:
    """Show what this node may do, or set what is named; a running agent takes it over within seconds.

    The limits are kept in limits.toml in the home. --vram-share and --threads take effect at the next start. While
    a limit holds, the agent stays and fetches versions, and `status` names the limit. A mirror obeys --upload-gb
    only.
    """
    from swarm_node.allowance import settings
    from swarm_node.keys import identity

    named = given(
        hours=hours,
        zone=zone,
        idle_minutes=idle_minutes,
        on_battery=on_battery,
        power_watts=power_watts,
        vram_share=vram_share,
        threads=threads,
        upload_gb=upload_gb,
        price_floor=price_floor,
    )
    found = settings.changed(home, named)
    if named:
        settings.write(home, found)
    if as_json:
        typer.echo(found.model_dump_json())
        return
    for name, field in settings.Limits.model_fields.items():
        typer.echo(f"{name:<14} {json.dumps(getattr(found, name)):<16} {field.description}")
    typer.echo(str(home / settings.FILE))
    if not (home / identity.FILE).exists():
        typer.echo(
            f"There is no node in {home} yet: it is the next `join` there that keeps to this. --home names another."
        )
    if found.power_watts:
        typer.echo(
            "The cap is kept by breaks, by the mean of minutes. A cap at every moment needs root: "
            f"`nvidia-smi -pl {found.power_watts:.0f}`."
        )
    if "vram_share" in named or "threads" in named:
        typer.echo("vram_share and threads hold from the next start of the agent.")


def _order(do: str, home: Home, as_json: bool, said: str) -> None:
    import trio

    from swarm_node.owner.control_client import ask

    told = trio.run(ask, home, do)
    typer.echo(json.dumps(told) if as_json else said)


def _show(told: dict[str, Any], as_json: bool) -> None:
    from swarm_node.owner import status_lines

    typer.echo(json.dumps(told) if as_json else "\n".join(status_lines.of_status(told)))


def add_to(app: typer.Typer) -> None:
    """Make these commands of the program."""
    for command, example, then in (
        (status, "swarm-node status", "`why` tells what became of single leases, `earnings` what is owed."),
        (pause, "swarm-node pause", "`resume` goes on; `leave` ends the agent."),
        (resume, "swarm-node resume", "`status` says whether the limits let it work now."),
        (finish, "swarm-node finish", "`resume` before it has ended takes that back."),
        (leave, "swarm-node leave", "`join` continues, with the same key and all that was earned."),
        (
            limits,
            "swarm-node limits --hours 22:00-07:00 --upload-gb 200",
            "`status` says when one keeps it from working.",
        ),
    ):
        app.command(epilog=lesson(example, then, EXIT_CODES))(command)
