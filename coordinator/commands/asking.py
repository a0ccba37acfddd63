"""Requests of the operator's commands to the coordinator of a round, or to its store if none runs.

- The address of a launched round is in `resolved.json`: the file may have been launched with other settings.
- A coordinator always listens at `round.listen` without TLS, on its own machine: it is asked directly, whatever proxy
  the environment names. From other machines, the commands use `round.public_url`, and send the operator's token over
  HTTPS only.
"""

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import urlsplit, urlunsplit

from coordinator.config import Config, fixed
from protocol.errors import NotAuthorised, SwarmError, Unreachable
from protocol.people.addresses import host_and_port

if TYPE_CHECKING:
    import sqlalchemy as sa

    from coordinator.store.state import Database

P = ParamSpec("P")
T = TypeVar("T")

ASK_S = 10.0

ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # keys are replaced by values
"""The address to use for a coordinator that listens at every address of its machine."""


def launched(config: Config) -> Config:
    """Return the settings of the round's last launch; those of the file if there was none."""
    folder = config.round.directory
    return fixed.load_resolved(folder) if fixed.is_round(folder) else config


def local_url(config: Config) -> str:
    """Return the URL of a coordinator on its own machine."""
    host, port = host_and_port(config.round.listen)
    address = ANYWHERE.get(host, host)
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def ask(
    config: Config,
    method: str,
    path: str,
    content: object = None,
    *,
    as_operator: bool = True,
    patience_s: float = ASK_S,
) -> Any:
    """Return the running coordinator's answer; None if none answers, or only that of another round, at its address."""
    headers = {"Accept": "application/json"}
    if as_operator:
        headers["Authorization"] = f"Bearer {_token(config)}"
    here = local_url(launched(config))
    for url in _urls(launched(config), as_operator=as_operator):
        send = _send_here if url == here else _send_elsewhere
        try:
            return _answer(send, method, f"{url}{path}", content, headers, patience_s)
        except _NobodyThere:
            continue
        except NotAuthorised:
            if not (as_operator and url == here):
                raise
    return None


def is_ours(config: Config, round_id: str) -> bool:
    """Return False if the round in this folder has another id: the coordinator at its address leads another round."""
    if not fixed.is_round(config.round.directory):
        return True
    from coordinator.store.facts import ROUND_ID, get_fact

    return bool(run_in_store(config, lambda store: get_fact(store, ROUND_ID)) in ("", round_id))


def run_in_store(
    config: Config, effect: "Callable[Concatenate[sa.Connection, P], T]", *args: P.args, **kwargs: P.kwargs
) -> T:
    """Run one effect on the store of a round, whose coordinator may be running."""
    with closing(opened_store(config)) as database:
        return database.run_now(effect, *args, **kwargs)


def opened_store(config: Config) -> "Database":
    """Open the store of a round, of the kind of its last launch; the coordinator may be running."""
    from coordinator.store.state import Database

    fixed.require_round(config.round.directory)
    return Database(launched(config).state)


def stopped_since_ms(config: Config) -> int:
    """Return since when a round that does not answer has no leader; raise an error if a coordinator leads it."""
    from coordinator.service.opening import led_until_ms

    since_ms = led_until_ms(config.round.directory)
    if since_ms is None:
        raise Unreachable(
            f"A coordinator leads the round in {config.round.directory}, but does not answer at "
            f"{local_url(launched(config))}.",
            hint="If it runs on another machine or in a container, run the command there; otherwise read its log.",
        )
    return since_ms


def launch_command(config_file: Path, settings: Sequence[str]) -> str:
    """Return the command that launches the round of these arguments: another setting may name another round."""
    words = ["swarm-coordinator", "launch", str(config_file), *(word for each in settings for word in ("--set", each))]
    return shlex.join(words)


def stopped_line(config: Config, launch: str, since_ms: int) -> str:
    """Return a line that says since when the round is stopped, and what `launch` does with it."""
    from coordinator.reports import programs
    from coordinator.store.facts import FINISHED, get_fact

    if not run_in_store(config, programs.was_launched):
        return f"NOT LAUNCHED YET: start it with `{launch}`."
    when = datetime.fromtimestamp(since_ms / 1000, UTC)
    if run_in_store(config, lambda store: get_fact(store, FINISHED)):
        return f"FINISHED, and STOPPED since {when:%Y-%m-%d %H:%M:%S} UTC: `{launch}` serves its pages again."
    return f"STOPPED since {when:%Y-%m-%d %H:%M:%S} UTC: continue with `{launch}`."


def _urls(config: Config, *, as_operator: bool) -> Iterator[str]:
    if has_token(config):  # else the round's folder is on another machine, and so is its coordinator
        yield local_url(config)
    elsewhere = config.round.public_url.rstrip("/")
    if elsewhere and (elsewhere.startswith("https://") or not as_operator):
        yield elsewhere


class _NobodyThere(Exception):
    """A request without effect: no coordinator answers at this address."""


class _NoAnswer(Exception):
    """A request that was sent, and got no answer, or one that is not JSON."""


Send = Callable[[str, str, object, dict[str, str], float], tuple[int, Any]]
"""Send a request, and return the status of the answer and its JSON."""


def _answer(send: Send, method: str, url: str, content: object, headers: dict[str, str], patience_s: float) -> Any:
    """Return the answer of one address. Raise `Unreachable` if a sent order got no answer: it may have an effect."""
    try:
        status, said = send(method, url, content, headers, patience_s)
    except _NoAnswer as error:
        if method == "GET":
            raise _NobodyThere from None
        raise Unreachable(
            f"The coordinator gave no answer ({error}): the order may have been carried out, or not.",
            hint="Check the state when it is back, and repeat the order if necessary: it is never carried out twice.",
        ) from error
    if status >= 400:
        raise SwarmError.from_wire(said)
    return said


def _send_here(method: str, url: str, content: object, headers: dict[str, str], patience_s: float) -> tuple[int, Any]:
    """Send a request to this machine, without a client library, whose import would take longer than the answer."""
    parts = urlsplit(url)
    body = None if content is None else json.dumps(content).encode()
    kind = {} if body is None else {"Content-Type": "application/json"}
    with closing(HTTPConnection(parts.hostname or "", parts.port, timeout=ASK_S)) as connection:
        try:
            connection.connect()
        except OSError:
            raise _NobodyThere from None
        connection.sock.settimeout(patience_s)
        try:
            connection.request(method, urlunsplit(("", "", parts.path, parts.query, "")), body, headers | kind)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        except (OSError, HTTPException, ValueError) as error:
            raise _NoAnswer(repr(error)) from error


def _send_elsewhere(
    method: str, url: str, content: object, headers: dict[str, str], patience_s: float
) -> tuple[int, Any]:
    """Send a request to the public address."""
    import httpx

    try:
        timeout = httpx.Timeout(ASK_S, read=patience_s)
        response = httpx.request(method, url, json=content, headers=headers, timeout=timeout)
        return response.status_code, response.json()
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.InvalidURL):
        raise _NobodyThere from None
    except (httpx.HTTPError, ValueError) as error:
        raise _NoAnswer(repr(error)) from error


def has_token(config: Config) -> bool:
    """Return True if the operator's token is on this machine; other machines may have none."""
    return _token_file(config).exists()


def _token(config: Config) -> str:
    if not has_token(config):
        raise fixed.no_round(config.round.directory)
    return _token_file(config).read_text()


def _token_file(config: Config) -> Path:
    return config.round.directory / "operator.token"
