"""Routes of the installer: `/install.sh` is installers/install.sh with this round's join string, and perhaps a wheel.

- `curl -fsS https://HOST/install.sh | sh` trusts this server for the program that it installs. A cautious owner takes a
  release instead; the join string protects only what the agent runs later.
- The wheel is `round.agent_wheel`; the script names its SHA-256. Without one, the script installs the newest release.
- Values enter the script as quoted words of the shell. The script does nothing until its last line has arrived.
"""

import asyncio
import hashlib
import re
import shlex
from importlib import resources
from pathlib import Path

from aiohttp import web

from coordinator.api.http import ROUND
from coordinator.api.snapshot import Page
from coordinator.config import Config
from protocol.errors import ConfigInvalid, NotFound

routes = web.RouteTableDef()

NAME = re.compile(r"echo_swarm-[A-Za-z0-9.+!]+-py3-none-any\.whl")
AGE_S = 60
"""Time for which a proxy may keep the script: it changes only when the coordinator starts again."""


@routes.get("/install.sh")
async def script(request: web.Request) -> web.Response:
    """Return the installer of the node agent for this round."""
    round_ = request.app[ROUND]
    text = await asyncio.to_thread(filled, round_.config, round_.round_id)
    return Page(text.encode(), "text/x-shellscript; charset=utf-8", f"max-age={AGE_S}").reply(request)


@routes.get("/install/{wheel:[A-Za-z0-9._+!-]{1,100}}")
async def wheel(request: web.Request) -> web.StreamResponse:
    """Return the wheel that the installer of this round installs."""
    path = wheel_of(request.app[ROUND].config)
    if path is None or path.name != request.match_info["wheel"]:
        raise NotFound(f"There is nothing at {request.path[:100]}.")
    data = await asyncio.to_thread(path.read_bytes)
    return web.Response(body=data, content_type="application/octet-stream")


def filled(config: Config, round_id: str) -> str:
    """Return the installer with the values of a round."""
    text = _installer()
    path = wheel_of(config)
    values = {"ROUND_JOIN": config.round.join_string(round_id)}
    if path is not None:
        values |= {"ROUND_WHEEL": path.name, "ROUND_WHEEL_SHA256": hashlib.sha256(path.read_bytes()).hexdigest()}
    for name, value in values.items():
        line = f"\n{name}=\n"
        if text.count(line) != 1:
            raise RuntimeError(f"install.sh has no line for {name}")
        text = text.replace(line, f"\n{name}={shlex.quote(value)}\n")
    return text


def wheel_of(config: Config) -> Path | None:
    """Return the wheel that the installer installs; None if it installs a release."""
    if not config.round.agent_wheel:
        return None
    path = Path(config.round.agent_wheel)
    if not NAME.fullmatch(path.name) or not path.is_file():
        raise ConfigInvalid(
            f"round.agent_wheel: {path} is not a wheel of echo-swarm.",
            hint="Build one with `make release`, and name the file echo_swarm-….whl in dist/.",
        )
    return path


def _installer() -> str:
    """Return install.sh of the installed package, or of the checkout."""
    package = resources.files("coordinator")
    for place in (package.joinpath("installation/install.sh"), package.joinpath("../installers/install.sh")):
        if place.is_file():
            return place.read_text()
    raise NotFound("This coordinator has no installer.", hint="Install the node agent from a release or a checkout.")
