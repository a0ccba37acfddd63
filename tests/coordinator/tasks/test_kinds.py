"""Kinds of tasks: what an environment needs is checked before its round begins."""

from typing import Any

import pytest

from coordinator.config import Config, parse
from coordinator.tasks.kinds import environment_of, process_spec, require_granted, turn_tokens_max
from protocol.errors import ConfigInvalid


def settings(name: str, **sections: Any) -> Config:
    return parse({"task": {"name": name}} | sections)


def test_the_limit_of_a_turn_is_for_episodes_alone() -> None:
    assert turn_tokens_max(settings("kuhn", episode={"turn_tokens_max": 7})) == 7
    assert turn_tokens_max(settings("arithmetic")) == 0
    assert environment_of(settings("arithmetic")) is None


@pytest.mark.parametrize("name", ["verifiers", "openenv", "nemo-gym"])
def test_an_environment_that_connects_needs_the_operators_permission(name: str) -> None:
    with pytest.raises(ConfigInvalid, match=r"reward\.network is off"):
        require_granted(settings(name))
    granted = settings(name, reward={"network": True})
    require_granted(granted)
    sandbox = process_spec(granted).sandbox
    assert sandbox is not None
    assert sandbox.network


def test_games_run_without_a_network() -> None:
    require_granted(settings("leduc"))
    sandbox = process_spec(settings("leduc")).sandbox
    assert sandbox is not None
    assert not sandbox.network
