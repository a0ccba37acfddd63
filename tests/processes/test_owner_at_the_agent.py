"""The owner and a real agent in mid-generation: pause, status, resume, a second agent, finish, and what is said."""

import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.processes.programs import PATIENCE_S, Program, Swarm, script, until, words_of
from tests.processes.rounds import (
    NOBODY_LEARNS,
    Coordinator,
    Settings,
    assert_ledger_is_sound,
    join,
    node_id_of,
    operator_of,
)

pytestmark = pytest.mark.processes

GROUPS = 8
SETTINGS: Settings = {
    "sampling": {"samples_per_group": 32, "max_new_tokens": 300},
    **NOBODY_LEARNS,
    "leases": {"groups_per_request": GROUPS, "newcomer_leases": GROUPS},
}


@pytest.fixture(scope="module")
def coordinator(swarm: Swarm, policy: Path) -> Coordinator:
    coordinator = Coordinator(swarm, SETTINGS).start()
    operator_of(swarm, coordinator, policy).publish()
    return coordinator


def command(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command as an owner types it in another terminal."""
    full = [script("swarm-node"), *words, "--home", str(home)]
    return subprocess.run(full, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def status(home: Path) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(command(home, "status", "--json").stdout)
    return said


def engines_of(node: Program) -> list[int]:
    return [child.pid for child in node.descendants() if "engine" in words_of(child)]


def test_a_doctor_finds_the_round_the_clock_and_the_line_and_leaves_nothing_behind(
    swarm: Swarm, coordinator: Coordinator
) -> None:
    home = swarm.folder / "patient"
    examined = command(home, "doctor", coordinator.join_string, "--no-engines", "--json")
    assert examined.returncode == 0, examined
    said = {finding["check"]: finding for finding in json.loads(examined.stdout)["findings"]}
    assert {said[check]["state"] for check in ("round", "clock", "down", "up", "reach", "disk")} == {"ok"}, said
    assert said["reach"]["said"] == "The coordinator can connect to this machine."
    assert "MB/s" in said["down"]["evidence"]
    assert not home.exists()


def test_an_agent_without_a_page_says_how_to_turn_it_on(swarm: Swarm, coordinator: Coordinator) -> None:
    home = swarm.folder / "pageless"
    node = join(swarm, "pageless", coordinator.join_string, "--no-page", home=home)
    until("the node to be registered", lambda: (home / "last-round.json").exists())
    opened = command(home, "open", "--no-browser")
    assert opened.returncode == 1
    assert "serves no page. It was turned off by `join --no-page`." in opened.stderr
    assert "swarm-node join --page" in opened.stderr
    assert command(home, "leave").returncode == 0
    assert node.process.wait(PATIENCE_S) == 0


def test_an_owner_pauses_resumes_and_finishes_an_agent(swarm: Swarm, coordinator: Coordinator) -> None:
    home = swarm.folder / "home"
    node = join(swarm, "node", coordinator.join_string, "--groups", str(GROUPS), home=home)
    node_id = node_id_of(node)
    until("the node to have leases", lambda: coordinator.open_leases() == GROUPS)
    assert engines_of(node)

    assert command(home, "pause").returncode == 0
    shown = until("the agent to rest", lambda: (s := status(home))["phase"] == "resting" and s)
    assert shown
    assert "paused by you" in shown["resting"]
    assert (shown["open_leases"], shown["version"]) == (0, 0)
    until("the engine to leave the memory", lambda: not engines_of(node))
    until("its leases to be back", lambda: not coordinator.open_leases())
    assert set(coordinator.leases_of(node_id).values()) <= {"skipped", "accepted"}
    assert "not working: paused by you" in command(home, "status").stdout

    refused = subprocess.run(
        [script("swarm-node"), "join", coordinator.join_string, "--home", str(home)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert refused.returncode == 2
    assert "Another agent is running" in refused.stderr
    assert status(home)["phase"] == "resting", "the one that was refused has not taken the door away"

    resume_by_the_page(home)
    until("the node to have leases again", coordinator.open_leases)
    assert command(home, "finish").returncode == 0
    assert node.process.wait(timeout=PATIENCE_S) == 0, node.log
    assert Counter(coordinator.leases_of(node_id).values())["accepted"] > 0
    assert not coordinator.open_leases()
    earnings = json.loads(node.output)
    assert earnings["rejected"] == {}
    assert_ledger_is_sound(coordinator)

    gone = command(home, "status")
    assert gone.returncode == 1
    assert "No agent is running" in gone.stdout
    assert "finished, as you requested" in gone.stdout
    assert command(home, "pause").returncode == 1
    assert "No agent is running" in command(home, "open").stderr
    assert "Traceback" not in node.log


def resume_by_the_page(home: Path) -> None:
    """Open the agent's page, read it, and press its button."""
    address = json.loads(command(home, "open", "--json").stdout)["address"]
    with httpx.Client(follow_redirects=True, timeout=PATIENCE_S) as browser:
        page = browser.get(address)
        assert "token" not in str(page.url)
        assert "not working: paused by you" in page.text
        assert "INFO registered" in page.text, "the log"
        own, command_s = browser.get(f"{page.url}status.json").json(), status(home)
        assert own.keys() == command_s.keys()
        assert own["node_id"] == command_s["node_id"]
        form = {"do": "resume", "minutes": "60"}
        refused = browser.post(f"{page.url}orders", data=form, headers={"Origin": "http://127.0.0.1:1"})
        assert refused.status_code == 403
        assert status(home)["phase"] == "resting"
        done = browser.post(f"{page.url}orders", data=form, headers={"Origin": f"http://{page.url.netloc.decode()}"})
        assert "Resumed." in done.text
        assert httpx.get(address).status_code == 403, "an address works once"
