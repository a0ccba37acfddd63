"""Commands that only read and ask start without the libraries that they do not use."""

import asyncio
import gc
import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from pydantic_core import SchemaError

from coordinator.base.children import script
from protocol.start import quick_imports
from protocol.wire.signing import NodeKey
from swarm_node.coordinator_api import last_round
from swarm_node.coordinator_api.join_string import JoinString
from swarm_node.keys import identity
from tests.coordinator.served import serve
from tests.processes.programs import free_address
from tests.tidy.repository import ROOT

pytestmark = pytest.mark.processes

NEVER = {"torch", "transformers", "numpy", "sqlalchemy", "alembic", "aiohttp", "libp2p", "tuf", "boto3", "pygments"}
CLIENTS = {"httpx", "httpcore"}
IMPORTED = re.compile(r"^import time: +\d+ \| +\d+ \| +(\S+)$", re.MULTILINE)


def test_imports_collect_no_garbage_whatever_becomes_of_them() -> None:
    with suppress(ImportError), quick_imports():
        with quick_imports():
            assert not gc.isenabled()
        assert not gc.isenabled(), "the outer block is not over"
        raise ImportError
    assert gc.isenabled()


def imports(program: str, *words: str, said: str) -> set[str]:
    """Run a command, and return the modules that it imported, once it has printed what it should."""
    return imported([script(program), *words], said)


def imported(words: list[str], said: str) -> set[str]:
    """Run Python, and return the modules that it imported, once it has printed what it should."""
    command = [sys.executable, "-P", "-X", "importtime", *words]
    ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    printed = ran.stdout + IMPORTED.sub("", ran.stderr)
    assert said in printed, printed
    return set(IMPORTED.findall(ran.stderr))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home that has joined a round, whose coordinator does not answer."""
    folder = tmp_path_factory.mktemp("home")
    key: NodeKey = identity.load_or_create(folder / identity.FILE).key
    last_round.record_joined(folder, [JoinString(f"http://{free_address()}", "a" * 64)], "")
    (folder / "directory").write_text(key.node_id)
    return folder


@pytest.mark.parametrize(
    ("command", "said", "unused"),
    [
        (("status",), "No agent is running", NEVER | CLIENTS),
        (("open",), "No agent is running", NEVER | CLIENTS),
        (("limits",), "working hours", NEVER | CLIENTS),
        (("earnings",), "unreachable", NEVER),
        (("why",), "unreachable", NEVER),
    ],
)
def test_a_command_of_the_owner_starts_without(
    home: Path, command: tuple[str, ...], said: str, unused: set[str]
) -> None:
    assert not imports("swarm-node", *command, "--home", str(home), said=said) & unused


def test_the_client_of_trainers_starts_without() -> None:
    """docs/trainers.md says that it needs no extra."""
    program = "import echo_swarm, echo_swarm.weights; print('ready')"
    assert not imported(["-c", program], "ready") & (NEVER - {"numpy", "pygments"})  # httpx colours its own command


def test_the_list_of_rounds_starts_without(home: Path) -> None:
    place = f"{home}/rounds.json#{(home / 'directory').read_text()}"
    loaded = imports("swarm-node", "rounds", "--directory", place, "--home", str(home), said="rounds.json")
    assert "swarm_node.commands.finding" in loaded
    assert not loaded & NEVER


def test_plan_and_check_of_settings_start_without() -> None:
    demo, figures = str(ROOT / "examples" / "demo.toml"), ("--train-s", "60", "--group-s", "55", "--broadcast-s", "20")
    assert not imports("swarm-coordinator", "plan", demo, *figures, said="node") & (NEVER | CLIENTS)
    free = ("--set", "round.listen=127.0.0.1:0", "--set", "round.seeder=127.0.0.1:0")  # a demo may run here
    assert not imports("swarm-coordinator", "config", "check", demo, *free, said="is valid") & (NEVER | CLIENTS)


def test_the_state_of_a_running_round_is_shown_without(tmp_path: Path) -> None:
    async def run() -> set[str]:
        async with serve(tmp_path) as served:
            resolved = served.round.config.round.directory / "resolved.json"
            config = json.loads(resolved.read_text())
            config["round"]["listen"] = f"127.0.0.1:{served.client.port}"
            resolved.write_text(json.dumps(config))
            file = tmp_path / "round.toml"
            file.write_text(f'[round]\ndirectory = "{resolved.parent}"\n')
            return await asyncio.to_thread(
                imports, "swarm-coordinator", "status", str(file), said=served.round.round_id
            )

    assert not asyncio.run(run()) & (NEVER | CLIENTS | {"asyncio"})


def test_the_operators_token_is_not_sent_to_a_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An order to the coordinator of this machine goes directly to it, whatever proxy the environment names."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://{free_address()}")  # nobody is there: an order to it would fail
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert "http_proxy" in os.environ
    test_the_state_of_a_running_round_is_shown_without(tmp_path)


def test_ctrl_c_while_pydantic_builds_a_class_is_a_keyboard_interrupt() -> None:
    """Pydantic raises an error of its own then, whose traceback fills the terminal."""
    with pytest.raises(KeyboardInterrupt), quick_imports():
        raise SchemaError("Error building `literal` serializer:\n  KeyboardInterrupt: ")
    with pytest.raises(SchemaError, match="another"), quick_imports():
        raise SchemaError("another")
