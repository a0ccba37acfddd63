"""The demo's command, small: it runs to its end, tells the truth and keeps secrets; Ctrl-C leaves nothing behind."""

import json
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from ledger import store
from tests.processes.programs import ENDS_WITHIN_S, Program, Swarm, script, until

pytestmark = pytest.mark.processes

EXAMPLE = Path(__file__).parents[2] / "examples" / "demo.toml"
KEYS = [
    "seed",
    "accuracy_before",
    "accuracy_after",
    "versions",
    "bytes_from_peers",
    "bytes_from_origin",
    "rollouts",
    "outcome",
    "rejected",
    "broadcast",
    "learner_idle_share",
    "max_staleness",
    "age",
    "in_vain_share",
    "audit",
    "credit_micros_per_update",
    "fleet",
    "credits_by_node",
    "seconds",
]
STALENESS, KAPPA, UPDATES, SAMPLES = 4, 3, 6, 4
SETTINGS = {
    "round.max_updates": UPDATES,
    "staleness.max_updates": STALENESS,
    "sampling.samples_per_group": SAMPLES,
    "learner.groups_per_update": 8,
    "leases.groups_per_request": 2,
    "leases.heartbeat_s": 0.2,
    "publish.chunk_size_bytes": 1024,
}

PUBLIC = {"public", "metadata", "blobs"}


def demo(swarm: Swarm, name: str, policy: Path, *options: str) -> Program:
    """Start the demo with a policy so small that it needs no warm start."""
    settings = {**SETTINGS, "model.path": policy}
    chosen = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    folder = str(swarm.folder / name)
    return swarm.start(
        name, script("swarm-coordinator"), "demo", str(EXAMPLE), *chosen, "--directory", folder, *options
    )


def posted_by_name(folder: Path) -> dict[str, int]:
    """Return the posted credit by name from the ledger of a finished demo."""
    engine = sa.create_engine(f"sqlite:///{folder / 'round' / 'state.db'}")
    try:
        with engine.begin() as connection:
            assert store.rebuild(connection) == []
            names = dict(map(tuple, connection.execute(sa.text("SELECT node_id, name FROM nodes"))))
            return {names[total.node_id]: total.posted_micros for total in store.node_totals(connection)}
    finally:
        engine.dispose()


@pytest.fixture(scope="module")
def whole(swarm: Swarm, policy: Path) -> Program:
    """A demo that has run to its end."""
    program = demo(swarm, "whole", policy, "--seed", "7", "--nodes", "3", "--json", str(swarm.folder / "out.json"))
    assert program.process.wait(timeout=600) == 0, program.output
    return program


def test_small_demo_runs_to_its_end_and_its_summary_is_what_the_ledger_says(swarm: Swarm, whole: Program) -> None:
    program = whole
    summary: dict[str, Any] = json.loads((swarm.folder / "out.json").read_text())

    assert sorted(summary) == sorted(KEYS)
    assert summary["seed"] == 7
    assert summary["versions"] == 1 + UPDATES // KAPPA
    assert summary["bytes_from_peers"] > 0
    assert summary["bytes_from_origin"] > 0
    assert 0 < summary["broadcast"]["median_s"] <= summary["broadcast"]["max_s"] < summary["seconds"]
    assert 0 <= summary["max_staleness"] <= STALENESS
    assert 0 <= summary["learner_idle_share"] <= 1
    assert all(0 <= summary[key] <= 1 for key in ("accuracy_before", "accuracy_after"))
    assert summary["rollouts"]["accepted"] >= UPDATES * SETTINGS["learner.groups_per_update"] * SAMPLES
    assert summary["rollouts"]["generated"] == summary["rollouts"]["accepted"] + sum(summary["rejected"].values())
    assert set(summary["credits_by_node"]) == {"demo-1", "demo-2", "demo-3"}
    assert {name: micros for name, micros in summary["credits_by_node"].items() if micros} == posted_by_name(
        swarm.folder / "whole"
    )
    assert summary["audit"]["share"] > 0
    assert set(summary["audit"]["verdicts"]) <= {"pass", "soft"}
    assert "held-out accuracy" in program.output
    assert f"first token of version {summary['broadcast']['version']}" in program.output
    assert "swarm-coordinator init round.toml" in program.output
    assert "Traceback" not in program.log
    until("every process of it to be gone", lambda: not swarm.members())


@pytest.mark.usefixtures("whole")
def test_others_may_serve_what_is_public_of_its_round_and_read_nothing_else(swarm: Swarm) -> None:
    """Other users of the coordinator's machine."""
    folder = swarm.folder / "whole" / "round"
    names = {path.name for path in folder.iterdir()}
    assert names >= {*PUBLIC, "keys", "logs", "uploads", "learner", "auditors", "state.db"}
    for path in (folder, *folder.rglob("*")):
        mode, inner = path.lstat().st_mode, path.relative_to(folder)
        if path.is_symlink():
            continue
        if path == folder or inner.parts[0] in PUBLIC:
            assert mode & 0o004, path
        else:
            assert not mode & 0o077, path


@pytest.mark.slow
def test_ctrl_c_in_the_demo_ends_coordinator_learner_seeder_nodes_and_engines(swarm: Swarm, policy: Path) -> None:
    program = demo(swarm, "cut-short", policy, "--nodes", "2", "--set", "round.max_updates=100000")
    logs = [swarm.folder / "cut-short" / "logs" / f"node-{number}.log" for number in (1, 2)]
    until(
        "both nodes to sample",
        lambda: all("throughput" in log.read_text() for log in logs if log.exists()) and logs[1].exists(),
    )
    assert len(program.descendants()) >= 2 + 1 + 2 * 2  # learner and seeder, coordinator, nodes with an engine each
    seconds = program.interrupt()
    assert seconds < ENDS_WITHIN_S, f"Ctrl-C took {seconds:.1f} s"
    print(f"Ctrl-C took {seconds:.1f} s")
    assert program.process.returncode == 130
    until("every process of it to be gone", lambda: not swarm.members())
    assert "Traceback" not in program.log
    assert all("Traceback" not in log.read_text() for log in logs)
