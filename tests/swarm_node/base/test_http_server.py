"""The room for connections to a node's HTTP server."""

from contextlib import ExitStack

from swarm_node.base.http_server import ADDRESS_CONNECTIONS_MAX, CONNECTIONS_MAX, ConnectionRoom


def test_slow_clients_of_one_network_leave_room_for_others() -> None:
    room = ConnectionRoom()
    with ExitStack() as slow:
        stayed = [slow.enter_context(room.entered(f"2001:db8::{number:x}")) for number in range(CONNECTIONS_MAX)]
        assert stayed == [True] * ADDRESS_CONNECTIONS_MAX + [False] * (CONNECTIONS_MAX - ADDRESS_CONNECTIONS_MAX)
        with room.entered("2001:db8:0:100::1") as other, room.entered("::ffff:192.0.2.1") as mapped:
            assert other
            assert mapped
    with room.entered("2001:db8::1") as again:
        assert again


def test_a_proxy_of_this_machine_may_have_all_connections() -> None:
    room = ConnectionRoom()
    with ExitStack() as held:
        stayed = [held.enter_context(room.entered("127.0.0.1")) for _ in range(CONNECTIONS_MAX + 1)]
        assert stayed == [True] * CONNECTIONS_MAX + [False]
        assert not held.enter_context(room.entered("192.0.2.1"))
