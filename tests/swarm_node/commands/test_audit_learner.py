"""`swarm-node audit-learner`: what the limits of a volunteer's machine say about a learner."""

import json
from pathlib import Path

import pytest

from protocol.errors import EngineFailed
from swarm_node.commands import audit_learner
from swarm_node.engine import memory


def test_a_replay_that_exceeds_the_limits_is_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mismatch would blame an honest learner that has a larger machine."""
    (tmp_path / "settings.json").write_text(json.dumps({"processes": 5}))
    allowed = []

    def exceed(_command: list[str], *, allowed_bytes: int, seconds_max: float) -> int:
        allowed.append(allowed_bytes)
        raise EngineFailed(f"The program took more than {seconds_max:.0f} s and was stopped.")

    monkeypatch.setattr(memory, "run_within", exceed)
    monkeypatch.setattr("swarm_node.machine.use.memory_bytes", lambda: (2**50, 2**50))
    said: list[str] = []
    assert audit_learner.replay(tmp_path, said.append) == audit_learner.NO_VERDICT
    assert said == ["no verdict: The program took more than 43200 s and was stopped."]
    assert allowed[0] > memory.ANY_POLICY_BYTES + 4 * memory.RANK_BYTES


@pytest.mark.parametrize("settings", ["", "[]", "{}", '{"processes": null}', '{"processes": 1e999}'])
def test_settings_without_a_number_of_ranks_are_those_of_one(settings: str, tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text(settings)
    assert audit_learner.ranks_of(tmp_path) == 1
