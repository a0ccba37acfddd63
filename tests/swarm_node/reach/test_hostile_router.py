"""A router, or somebody who plays one in the house, that lies, floods, stalls and points elsewhere."""

import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from ipaddress import IPv6Address

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from swarm_node.reach import messages
from swarm_node.reach.gateway import Gateway, NoMapping, gateway_from_command, gateway_from_routes
from swarm_node.reach.listening import Reachability
from swarm_node.reach.mapping import PortMapper, RenewalPace
from swarm_node.reach.methods import DATAGRAMS_MAX, Method, NatPmp, Pcp, Upnp
from tests.swarm_node.p2p_world import PATIENT_SECONDS, POLL_S

LOOPBACK = Gateway("127.0.0.1", "127.0.0.1")
PORT, NONCE = 8703, b"n" * 12
PUBLIC = "45.77.1.1"

pytestmark = pytest.mark.trio


def pcp_reply(request: bytes, address: str = PUBLIC, *, port: int = PORT, lease_s: int = 600, result: int = 0) -> bytes:
    """The reply to a MAP request, as a good router gives it."""
    head = struct.pack("!BBBBII12x", 2, 0x81, 0, result, lease_s, 7)
    external = IPv6Address(address if ":" in address else f"::ffff:{address}")
    return head + request[24:42] + struct.pack("!H", port) + external.packed


class Router:
    """Answers datagrams, and records them."""

    def __init__(self, answer: Callable[[bytes], list[bytes]]) -> None:
        self.answer = answer
        self.asked: list[bytes] = []
        self.port = 0

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM) as server:
            await server.bind(("127.0.0.1", 0))
            self.port = server.getsockname()[1]
            task_status.started()
            while True:
                data, sender = await server.recvfrom(4096)
                self.asked.append(data)
                for reply in self.answer(data):
                    await server.sendto(reply, sender)

    @property
    def removals(self) -> list[bytes]:
        """The MAP requests of PCP with lifetime 0."""
        return [data for data in self.asked if data[:2] == b"\x02\x01" and data[4:8] == bytes(4)]


@asynccontextmanager
async def router(answer: Callable[[bytes], list[bytes]]) -> AsyncIterator[Router]:
    made = Router(answer)
    with trio.fail_after(PATIENT_SECONDS):
        async with trio.open_nursery() as nursery:
            await nursery.start(made.run)
            yield made
            nursery.cancel_scope.cancel()


async def found() -> Gateway:
    return LOOPBACK


def mapper(reach: Reachability, *methods: Method, **pace: float) -> PortMapper:
    return PortMapper(PORT, reach, find=found, methods=methods, pace=RenewalPace(lease_s=600, **pace))


async def until(true: Callable[[], bool]) -> None:
    with trio.fail_after(PATIENT_SECONDS):
        while not true():  # noqa: ASYNC110  # nobody else needs to be told of it
            await trio.sleep(POLL_S)


GARBAGE = [
    *(b"", b"\0", b"\xff" * 60, b"\x02", b"\x02\x81", bytes(24), b"\x02\x81" + bytes(22), b"HTTP/1.1 200 OK\r\n\r\n"),
    *(b"\x02\x81" + bytes(58), b"\x03\x81" + bytes(58), b"\x02\x01" + bytes(58), b"\x02\x80" + bytes(58)),
]


async def test_garbage_is_passed_over_until_the_routers_reply_comes() -> None:
    def answer(request: bytes) -> list[bytes]:
        other_nonce = pcp_reply(request[:24] + b"x" * 12 + request[36:], "203.0.113.1")
        other_port = pcp_reply(request[:40] + b"\0\1" + request[42:], "203.0.113.2")
        return [*GARBAGE, other_nonce, other_port, pcp_reply(request)]

    async with router(answer) as made:
        mapping = await Pcp(server_port=made.port).map(LOOPBACK, PORT, 600)
    assert (mapping.address, mapping.port, mapping.lease_s) == (PUBLIC, PORT, 600)


async def test_a_flood_of_garbage_does_not_hold_the_node() -> None:
    async with router(lambda _request: [b"x"] * 2 * DATAGRAMS_MAX) as made:
        with pytest.raises(NoMapping, match="does not answer"):
            await Pcp(server_port=made.port).map(LOOPBACK, PORT, 600)


async def test_a_reply_of_another_machine_is_not_heard() -> None:
    """The other machine knows the nonce and the port, as nobody does who does not see the request."""
    forged = trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM)
    with forged, trio.fail_after(PATIENT_SECONDS):
        await forged.bind(("127.0.0.1", 0))
        server = trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM)
        await server.bind(("127.0.0.1", 0))

        async def serve() -> None:
            request, sender = await server.recvfrom(4096)
            await forged.sendto(pcp_reply(request, "203.0.113.66"), sender)
            await server.sendto(pcp_reply(request), sender)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            mapping = await Pcp(server_port=server.getsockname()[1]).map(LOOPBACK, PORT, 600)
        server.close()
    assert mapping.address == PUBLIC


@pytest.mark.parametrize(
    ("address", "port"),
    [
        *((address, PORT) for address in ("100.64.0.7", "10.1.1.1", "192.168.1.2", "127.0.0.1", "169.254.1.1")),
        *((address, PORT) for address in ("224.0.0.1", "255.255.255.255", "0.0.0.0", "fe80::1", "fd00::1")),
        (PUBLIC, 0),
    ],
)
async def test_an_external_address_that_nobody_can_dial_is_reported_and_not_advertised(address: str, port: int) -> None:
    """An address as behind a provider's NAT (CGNAT), and of a router that lies."""
    reach = Reachability(shares=True, own=("0.0.0.0:8703",))
    async with router(lambda request: [pcp_reply(request, address, port=port)]) as made, trio.open_nursery() as nursery:
        nursery.start_soon(mapper(reach, Pcp(server_port=made.port)).run)
        await until(lambda: bool(reach.mapping))
        assert (reach.mapped, reach.addresses) == ("", ("0.0.0.0:8703",))
        assert address in reach.mapping
        assert "second NAT" in reach.mapping
        assert made.removals, "what is of no use is given back"
        nursery.cancel_scope.cancel()


async def test_a_mapping_is_renewed_before_it_ends_and_follows_the_routers_address() -> None:
    addresses = ["45.77.1.1", "45.77.1.1", "45.77.1.2"]

    def answer(request: bytes) -> list[bytes]:
        return [pcp_reply(request, addresses[min(len(made.asked), len(addresses)) - 1])]

    reach = Reachability(shares=True)
    async with router(answer) as made, trio.open_nursery() as nursery:
        nursery.start_soon(mapper(reach, Pcp(server_port=made.port), renew_min_s=0.01, renew_max_s=0.01).run)
        await until(lambda: reach.mapped == "45.77.1.2:8703")
        assert not made.removals
        nursery.cancel_scope.cancel()
    assert len({request[24:36] for request in made.asked}) == 1, "one nonce, so that it is a renewal"
    assert made.removals


async def test_a_router_that_dies_loses_its_mapping_when_the_lease_has_ended_and_not_before() -> None:
    reach, is_alive = Reachability(shares=True), [True]

    def answer(request: bytes) -> list[bytes]:
        if is_alive:
            return [pcp_reply(request, lease_s=8)]
        return [pcp_reply(request, result=3)]  # as a router does that has just started

    async with router(answer) as made, trio.open_nursery() as nursery:
        pace = {"renew_min_s": 0.01, "renew_max_s": 0.01, "again_s": 0.01, "retry_s": 0.01}
        nursery.start_soon(mapper(reach, Pcp(server_port=made.port), **pace).run)
        await until(lambda: bool(reach.mapped))
        is_alive.clear()
        asked = len(made.asked)
        await until(lambda: len(made.asked) > asked + 3)
        assert reach.mapped, "the lease still runs, and the router may come back"
        await until(lambda: not reach.mapped)
        assert "malformed" in reach.mapping
        is_alive.append(True)
        await until(lambda: bool(reach.mapped))
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("lease_s", "pause_s"), [(0, 900.0), (1, 30.0), (60, 30.0), (600, 300.0), (1800, 900.0), (2**32 - 1, 900.0)]
)
async def test_no_lease_makes_the_node_ask_without_pause_or_forget_to_ask(lease_s: int, pause_s: float) -> None:
    assert RenewalPace().renewal_s(lease_s) == pause_s


async def test_a_machine_with_a_public_address_asks_nobody() -> None:
    async def public() -> Gateway:
        return Gateway("45.77.1.1", "45.77.1.9")

    reach = Reachability(shares=True)
    async with router(lambda _request: []) as made, trio.open_nursery() as nursery:
        methods = [Pcp(server_port=made.port)]
        nursery.start_soon(PortMapper(PORT, reach, find=public, methods=methods).run)
        await until(lambda: "public address" in reach.mapping)
        nursery.cancel_scope.cancel()
    assert not made.asked


DESCRIPTION = (
    '<?xml version="1.0"?><root xmlns="urn:schemas-upnp-org:device-1-0"><device><serviceList><service>'
    "<serviceType>{kind}</serviceType><controlURL>{url}</controlURL></service></serviceList></device></root>"
)
WAN_IP = messages.SERVICES[1]
BILLION_LAUGHS = (
    '<?xml version="1.0"?><!DOCTYPE r [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]><root>&b;</root>'
)


class Device:
    """A gateway device: the answer to a search, and the raw answers to HTTP requests, in turn."""

    def __init__(self, *answers: bytes, location: str = "http://127.0.0.1:{port}/desc.xml") -> None:
        self._answers, self._location = list(answers), location
        self.asked: list[bytes] = []
        self.http_port = 0

    async def serve(self, stream: trio.SocketStream) -> None:
        async with stream:
            self.asked.append(await stream.receive_some(65536))
            try:
                await stream.send_all(self._answers.pop(0) if self._answers else b"")
                if not self._answers:
                    await trio.sleep_forever()
            except trio.BrokenResourceError:
                pass  # the node has seen enough

    def search(self, _request: bytes) -> list[bytes]:
        location = self._location.format(port=self.http_port)
        return [f"HTTP/1.1 200 OK\r\nST: {messages.TARGETS[0]}\r\nLOCATION: {location}\r\n\r\n".encode()]


def http(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    lines = (f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers)
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def refusal(device: Device) -> str:
    """Return why UPnP maps nothing with this device."""
    async with router(device.search) as made, trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, device.serve, 0, host="127.0.0.1"))
        device.http_port = listener.socket.getsockname()[1]
        with pytest.raises(NoMapping) as caught:
            await Upnp(search_at=("127.0.0.1", made.port)).map(LOOPBACK, PORT, 600)
        nursery.cancel_scope.cancel()
    return str(caught.value)


def described(url: str = "/ctl", kind: str = WAN_IP) -> bytes:
    return http(DESCRIPTION.format(kind=kind, url=url).encode())


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (http(BILLION_LAUGHS.encode()), "document type"),
        (http(BILLION_LAUGHS.encode("utf-16")), "document type"),
        (http(b"x" * (messages.DOCUMENT_MAX_BYTES + 1)), "too many bytes"),
        (http(b"<a>" * (messages.ELEMENTS_MAX + 1)), "too many elements"),
        (http(b"not XML"), "cannot be read"),
        (http(b'<?xml version="1.0" encoding="no-such"?><a/>'), "cannot be read"),
        (http(b"<a/>", "Content-Encoding: gzip"), "names no service"),
        (described(kind="urn:schemas-upnp-org:service:Layer3Forwarding:1"), "names no service"),
        (described("http://203.0.113.9/ctl"), "names no service"),
        (described("http://127.0.0.1@203.0.113.9/ctl"), "names no service"),
        (described("https://127.0.0.1/ctl"), "names no service"),
        (described("http://localhost/ctl"), "names no service"),
        (described("http://127.0.0.1:99999/ctl"), "names no service"),
        (http(b"", "Location: http://203.0.113.9/", status="302 Found"), "status 302"),
        (b"garbage\r\n\r\n", "does not answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nx", "too slowly"),  # and then nothing, for ever
    ],
)
async def test_a_hostile_description_costs_the_mapping_and_nothing_else(answer: bytes, reason: str) -> None:
    assert reason in await refusal(Device(answer))


@pytest.mark.parametrize(
    "location",
    [
        *("http://203.0.113.9/desc.xml", "http://localhost:{port}/desc.xml", "https://127.0.0.1:{port}/desc.xml"),
        *(
            "http://x@127.0.0.1:{port}/",
            "http://127.0.0.1:{port}@203.0.113.9/",
            "file:///etc/passwd",
            "http://[::1",
            "",
        ),
    ],
)
async def test_an_answer_to_the_search_that_points_elsewhere_is_passed_over(location: str) -> None:
    device = Device(location=location)
    assert "does not answer" in await refusal(device)
    assert not device.asked


async def test_a_fault_is_reported_with_its_code() -> None:
    fault = "<s:Envelope xmlns:s='e'><s:Body><errorCode>606</errorCode><errorDescription>No</errorDescription></s:Body>"
    answer = http(f"{fault}</s:Envelope>".encode(), status="500 Internal Server Error")
    assert await refusal(Device(described(), answer, b"")) == "it answers with fault 606 (No)"


async def test_arguments_of_an_action_cannot_leave_their_element() -> None:
    _, body = messages.action_request(messages.Service(WAN_IP, "http://127.0.0.1/"), "Do", NewName="</NewName><Evil/>")
    assert b"<Evil/>" not in body


@given(data=st.binary(max_size=200))
async def test_no_bytes_are_read_as_anything_but_a_reply_or_a_reason(data: bytes) -> None:
    for read in (
        lambda: messages.read_pcp(data, NONCE, PORT),
        lambda: messages.read_natpmp(data, PORT),
        lambda: messages.read_natpmp_address(data),
        lambda: messages.read_search(data, "127.0.0.1"),
        lambda: messages.read_description(data, "http://127.0.0.1/", "127.0.0.1"),
        lambda: messages.read_fault(data),
    ):
        try:
            read()
        except NoMapping:
            continue


@given(result=st.integers(1, 255), cut=st.integers(4, 60))
async def test_every_refusal_has_words(result: int, cut: int) -> None:
    request = messages.pcp_request("192.168.77.2", NONCE, PORT, PORT, 600)
    with pytest.raises(NoMapping):
        messages.read_pcp(pcp_reply(request, result=result), NONCE, PORT)
    reply = struct.pack("!BBHIHHI", 0, 130, result, 7, PORT, PORT, 600)
    with pytest.raises(NoMapping):
        messages.read_natpmp(reply[:cut], PORT)


async def test_nat_pmp_replies_for_another_port_or_operation_are_none() -> None:
    good = struct.pack("!BBHIHHI", 0, 130, 0, 7, PORT, 9000, 600)
    assert messages.read_natpmp(good, PORT) == messages.Granted(9000, 600)
    assert messages.read_natpmp(good, PORT + 1) is None
    assert messages.read_natpmp_address(good) is None
    assert messages.read_natpmp_address(bytes([0, 128, 0, 0]) + bytes(4) + bytes([45, 77, 1, 1])) == PUBLIC


ROUTES = """Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
wlan0\t00000000\t014DA8C0\t0003\t0\t0\t600\t00000000\t0\t0\t0
eth0\t00000000\t0101A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0
eth1\t00000000\t0909A8C0\t0002\t0\t0\t1\t00000000\t0\t0\t0
tun0\t00000000\t00000000\t0001\t0\t0\t0\t00000000\t0\t0\t0
tun0\t00000000\t01000A0A\t0003\t0\t0\t0\t00000080\t0\t0\t0
"""


async def test_the_gateway_is_that_of_the_default_route_with_the_lowest_metric() -> None:
    assert gateway_from_routes(ROUTES) == "192.168.1.1"
    assert gateway_from_command("   route to: default\n    gateway: 192.168.1.1\n  interface: en0\n") == "192.168.1.1"
    for nothing in ("", "header\n", "header\nshort line\n"):
        with pytest.raises(NoMapping):
            gateway_from_routes(nothing)
    with pytest.raises(NoMapping):
        gateway_from_command("    gateway: fe80::1%en0\n")


async def test_nat_pmp_asks_for_the_address_before_it_maps() -> None:
    """A router without an address to give is left without a mapping that nobody can use."""
    async with router(lambda _request: [bytes([0, 128, 0, 3])]) as made:
        with pytest.raises(NoMapping, match="line to the internet is down"):
            await NatPmp(server_port=made.port).map(LOOPBACK, PORT, 600)
    assert made.asked == [messages.natpmp_address_request()]
