"""`swarm-node open`: the page of the running agent, in the owner's browser."""

import getpass
import json
import os
import sys
from collections.abc import Mapping
from typing import Annotated

import typer

from swarm_node.commands.options import DEFAULT_HOME, AsJson, Home

EXIT_CODES = "Exit codes: 0 done, 1 no agent is running or it has no page, 2 wrong usage."


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
