"""The modes of a round: presets of one configuration, and what each does to leases and batches."""

from pathlib import Path

import pytest

from coordinator.config import Config, ModelSection, fixed, load, parse
from coordinator.service import local_nodes
from coordinator.service.round import Round
from coordinator.transactions import registry
from protocol.errors import ConfigInvalid, NotInvited
from protocol.wire.signing import NodeKey
from protocol.work.messages import Register
from tests.coordinator.world import PRICE, World


def mode(name: str, *settings: str) -> Config:
    return load(None, [f"round.mode={name}", *settings])


def test_the_default_mode_changes_nothing() -> None:
    assert mode("echo2") == parse({})
    assert mode("echo2").staleness.admission == "visible"


def test_each_mode_is_other_defaults() -> None:
    assert mode("push-pull").staleness.admission == "buffer"
    assert mode("push-pull").staleness.buffered_max == 2 * (mode("push-pull").staleness.max_updates + 1)
    for name in ("sequential", "colocated"):
        assert (mode(name).staleness.max_updates, mode(name).staleness.kappa) == (0, 1)
    assert mode("sequential").fleet == mode("echo2").fleet
    assert (mode("colocated").fleet.local_nodes, mode("colocated").fleet.strangers) == (1, False)


@pytest.mark.parametrize("name", ["echo2", "push-pull", "sequential", "colocated"])
def test_single_keys_override_a_mode(name: str) -> None:
    config = mode(name, "staleness.max_updates=3", "staleness.publish_every=2", "fleet.local_nodes=5")
    assert (config.staleness.max_updates, config.staleness.publish_every, config.fleet.local_nodes) == (3, 2, 5)


@pytest.mark.parametrize("name", ["echo2", "push-pull", "sequential", "colocated"])
def test_the_resolved_settings_show_what_came_of_it(name: str) -> None:
    """The resolved settings stay the same when they are read again, even if the mode later changes."""
    config = mode(name, "fleet.local_nodes=2")
    assert Config.model_validate_json(config.model_dump_json()) == config
    told = config.model_dump()
    told["round"]["mode"] = "echo2"
    again = Config.model_validate(told)
    assert (again.staleness, again.fleet, again.audit) == (config.staleness, config.fleet, config.audit)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match=r"round\.mode: .*'echo2', 'push-pull'"):
        mode("async")


@pytest.mark.parametrize(
    "table", [{"round": 3}, {"round": {"mode": "sequential"}, "staleness": 3}, {"round": {"mode": []}}]
)
def test_a_mode_hides_no_other_mistake(table: dict[str, object]) -> None:
    with pytest.raises(ConfigInvalid):
        parse(table)


def test_a_round_that_nobody_may_sample_for_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match="otherwise no node samples"):
        mode("colocated", "fleet.local_nodes=0")


@pytest.mark.parametrize(
    ("path", "name"),
    [("hf://owner/name", "owner/name"), ("/models/policy", "policy"), ("policy/", "policy")],
)
def test_published_adapters_name_their_base_without_a_path_of_this_machine(path: str, name: str) -> None:
    assert ModelSection(path=path).base_name == name


def test_push_pull_samples_on_until_the_buffer_is_full_and_the_filter_drops_what_aged(tmp_path: Path) -> None:
    """S = 1 and B = 2: by visible versions four groups may start; a buffer of four updates' worth holds eight."""
    world = World(tmp_path, staleness=1, size=2, buffered_max=4)
    world.publish(1, 0)
    key = world.join(1)
    for _ in range(8):
        world.earn(key)
    assert world.offer(key).reason == "ahead"
    ages = []
    for number in (1, 2):
        ages += [number - 1 - group.policy_update for group in world.train(number).groups]
    assert ages == [0, 0, 1, 1]
    assert world.batch(3) is None, "what is left is two updates old"
    assert list(world.group_states().values()).count("open") == 4, "those prompts are sampled again"
    assert sum(world.owed(key.node_id)) > 0, "who worked in time is paid"
    world.publish(2, 2)
    world.earn(key, version=2)
    world.earn(key, version=2)
    assert {group.policy_update for group in world.train(3).groups} == {2}
    assert world.audit() == []
    world.database.close()


def test_without_the_buffer_the_same_swarm_stops_where_staleness_would_begin(tmp_path: Path) -> None:
    world = World(tmp_path, staleness=1, size=2)
    world.publish(1, 0)
    key = world.join(1)
    for _ in range(4):
        world.earn(key)
    assert world.offer(key).reason == "ahead"
    world.database.close()


@pytest.mark.parametrize("held", [1, 7, 8, 9])
def test_what_is_under_way_takes_room_in_the_buffer(tmp_path: Path, held: int) -> None:
    world = World(tmp_path, staleness=1, size=2, buffered_max=4)
    world.publish(1, 0)
    assert len(world.offer(world.join(1), groups=held).leases) == min(8, held)
    assert len(world.offer(world.join(2), groups=8).leases) == max(0, 8 - held)
    world.database.close()


def test_a_colocated_round_knows_its_own_nodes_and_takes_nobody_else(tmp_path: Path) -> None:
    config = mode("colocated", f"round.directory={tmp_path}", "fleet.local_nodes=2")
    round_ = Round(config)
    own = local_nodes.open_keys(config)
    assert len(own) == 2
    assert round_.invited == own
    assert {home.name for home in local_nodes.homes(config)} == {"node-1", "node-2"}
    stranger = NodeKey(b"s" * 32).node_id
    message = Register(name="x", price_micros_per_mtok=0, addresses=(), agent="")
    for node in own:
        round_.database.run_now(registry.register, node, message, max_price=PRICE, invited=round_.invited, now_ms=1)
    with pytest.raises(NotInvited, match="own machine"):
        round_.database.run_now(registry.register, stranger, message, max_price=PRICE, invited=round_.invited, now_ms=1)
    round_.close()
    again = Round(config)
    assert again.invited == own, "the keys stay"
    again.close()


def test_a_broken_key_of_a_local_node_is_named(tmp_path: Path) -> None:
    config = mode("colocated", f"round.directory={tmp_path}")
    local_nodes.open_keys(config)
    (local_nodes.homes(config)[0] / "node.key").write_text("half")
    with pytest.raises(ConfigInvalid, match="does not contain a node key"):
        local_nodes.open_keys(config)


@pytest.mark.parametrize(
    ("written", "says"), [("", "Invalid JSON"), ("\0" * 9, "Invalid JSON"), ('{"round": {"gone": 1}}', "round.gone: ")]
)
def test_damaged_settings_of_the_last_launch_are_named_in_one_line(tmp_path: Path, written: str, says: str) -> None:
    (tmp_path / fixed.RESOLVED).write_text(written)
    with pytest.raises(ConfigInvalid, match=f"resolved.json is damaged, or of another release: {says}"):
        fixed.load_resolved(tmp_path)
