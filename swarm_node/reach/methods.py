"""Three methods to map a TCP port at a router: PCP, NAT-PMP and UPnP-IGD, each with deadlines and size limits.

- Each asks the default gateway, over sockets that are connected to it or whose senders are compared with it.
- Each raises `NoMapping` with the reason if the router is silent, refuses, or sends an invalid answer.
"""

import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import AddressValueError, IPv4Address
from typing import Protocol, TypeVar
from urllib.parse import urlsplit

import httpx
import trio

from protocol.errors import MessageTooLarge
from swarm_node.coordinator_api.origin import read_at_most
from swarm_node.reach import messages
from swarm_node.reach.gateway import Gateway, NoMapping

T = TypeVar("T")

WAITS_S = (0.25, 0.5, 1.0, 2.0)
"""Pause after each sending of a request, as in RFC 6886, whose nine sendings would take two minutes: too long."""

DATAGRAM_MAX_BYTES = 2048
"""PCP allows 1100; an answer to a search has a few hundred."""

DATAGRAMS_MAX = 64
"""Limit of datagrams read for one request: there may be many devices, or a flood."""

SEARCH_S = 2.5
"""A device waits up to a second (MX) before it answers a search."""

HTTP_S = 5.0
"""Time-out of one HTTP answer, from connecting to its last byte; routers are slow."""

OTHER_PORTS = 3
"""External ports that UPnP is asked for when another machine holds the first."""


@dataclass(frozen=True)
class Mapping:
    """An external address that a router forwards to this node."""

    address: str
    port: int
    lease_s: int
    """Time until it expires without renewal; 0: until it is removed."""


class Method(Protocol):
    """Protocol for mapping ports."""

    name: str

    async def map(self, gateway: Gateway, port: int, lease_s: int) -> Mapping:
        """Map a port, or renew the mapping."""

    async def unmap(self, gateway: Gateway, port: int) -> None:
        """Remove the mapping."""


@dataclass
class Pcp:
    """The Port Control Protocol."""

    name: str = "PCP"
    server_port: int = messages.SERVER_PORT
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(messages.NONCE_BYTES))
    """Required to renew or remove the mapping."""

    async def map(self, gateway: Gateway, port: int, lease_s: int) -> Mapping:
        granted = await self._ask(gateway, port, lease_s)
        return Mapping(granted.address, granted.port, granted.lease_s)

    async def unmap(self, gateway: Gateway, port: int) -> None:
        await self._ask(gateway, port, 0)

    async def _ask(self, gateway: Gateway, port: int, lease_s: int) -> messages.Granted:
        request = messages.pcp_request(gateway.own_address, self.nonce, port, port if lease_s else 0, lease_s)
        return await ask(gateway, self.server_port, request, lambda d: messages.read_pcp(d, self.nonce, port))


@dataclass
class NatPmp:
    """The NAT Port Mapping Protocol."""

    name: str = "NAT-PMP"
    server_port: int = messages.SERVER_PORT

    async def map(self, gateway: Gateway, port: int, lease_s: int) -> Mapping:
        question = messages.natpmp_address_request()
        address = await ask(gateway, self.server_port, question, messages.read_natpmp_address)
        granted = await self._ask(gateway, port, lease_s)
        return Mapping(address, granted.port, granted.lease_s)

    async def unmap(self, gateway: Gateway, port: int) -> None:
        await self._ask(gateway, port, 0)

    async def _ask(self, gateway: Gateway, port: int, lease_s: int) -> messages.Granted:
        request = messages.natpmp_request(port, port if lease_s else 0, lease_s)
        return await ask(gateway, self.server_port, request, lambda d: messages.read_natpmp(d, port))


@dataclass
class Upnp:
    """UPnP's Internet Gateway Device."""

    name: str = "UPnP"
    search_at: tuple[str, int] = (messages.GROUP, messages.GROUP_PORT)
    _service: messages.Service | None = None
    _external: int = 0
    """The port that the router forwards."""

    async def map(self, gateway: Gateway, port: int, lease_s: int) -> Mapping:
        service = self._service or await self._find(gateway)
        try:
            return await self._map(service, gateway, port, lease_s)
        except NoMapping:
            self._service = None  # a restarted router may have another description URL
            raise

    async def unmap(self, gateway: Gateway, port: int) -> None:
        if self._service is not None and self._external:
            await _act(gateway, self._service, "DeletePortMapping", **_entry(self._external))

    async def _map(self, service: messages.Service, gateway: Gateway, port: int, lease_s: int) -> Mapping:
        address = messages.read_value(await _act(gateway, service, "GetExternalIPAddress"), "NewExternalIPAddress")
        try:
            IPv4Address(address)
        except AddressValueError:
            raise NoMapping("it knows no external address of its own") from None
        for external in dict.fromkeys((self._external or port, *range(port, port + OTHER_PORTS))):
            if not await self._is_free(service, gateway, external):
                continue
            granted_s = await self._add(service, gateway, port, external, lease_s)
            if granted_s is not None:
                self._service, self._external = service, external
                return Mapping(address, external, granted_s)
        raise NoMapping("other machines hold the external ports")

    async def _is_free(self, service: messages.Service, gateway: Gateway, external: int) -> bool:
        """Return False if another machine holds a port: some routers would silently reassign it."""
        try:
            holder = await _act(gateway, service, "GetSpecificPortMappingEntry", **_entry(external))
        except messages.RouterFault:  # 714: there is no such entry
            return True
        return messages.read_value(holder, "NewInternalClient") in ("", gateway.own_address)

    async def _add(
        self, service: messages.Service, gateway: Gateway, port: int, external: int, lease_s: int
    ) -> int | None:
        """Add a mapping and return its lease; None if another machine holds the port."""
        arguments = _entry(external) | {"NewInternalPort": port, "NewInternalClient": gateway.own_address}
        arguments |= {"NewEnabled": 1, "NewPortMappingDescription": "echo-swarm"}
        for granted_s in (lease_s, 0):
            try:
                await _act(gateway, service, "AddPortMapping", **arguments, NewLeaseDuration=granted_s)
                return granted_s
            except messages.RouterFault as refused:
                if refused.code == messages.CONFLICT:
                    return None
                if refused.code != messages.PERMANENT_LEASES_ONLY or not granted_s:
                    raise
        return None

    async def _find(self, gateway: Gateway) -> messages.Service:
        location = await self._search(gateway)
        document = await _http(gateway, "GET", location)
        return messages.read_description(document, location, gateway.address)

    async def _search(self, gateway: Gateway) -> str:
        """Return the URL of the gateway's own description; answers of other devices are ignored."""
        with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
            try:
                await asker.bind((gateway.own_address, 0))
                asker.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(gateway.own_address))
                asker.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 2)
                for target in messages.TARGETS:
                    await asker.sendto(messages.search_request(target), self.search_at)
                with trio.move_on_after(SEARCH_S):
                    for _ in range(DATAGRAMS_MAX):
                        data, (sender, *_) = await asker.recvfrom(DATAGRAM_MAX_BYTES)
                        location = messages.read_search(data, gateway.address) if sender == gateway.address else None
                        if location:
                            return location
            except OSError as error:
                raise NoMapping(f"it cannot be searched for: {error.strerror}") from None
        raise NoMapping("it does not answer")


async def ask(gateway: Gateway, port: int, request: bytes, read: Callable[[bytes], T | None]) -> T:
    """Send a datagram repeatedly until a valid reply arrives; only replies of the gateway are received."""
    with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        try:
            await asker.bind((gateway.own_address, 0))
            await asker.connect((gateway.address, port))
            for wait_s in WAITS_S:
                await asker.send(request)
                with trio.move_on_after(wait_s):
                    for _ in range(DATAGRAMS_MAX):
                        reply = read(await asker.recv(DATAGRAM_MAX_BYTES))
                        if reply is not None:
                            return reply
        except OSError:  # the router reports that the port is closed
            raise NoMapping("it does not offer this") from None
    raise NoMapping("it does not answer")


async def _act(gateway: Gateway, service: messages.Service, action: str, **arguments: str | int) -> bytes:
    headers, body = messages.action_request(service, action, **arguments)
    return await _http(gateway, "POST", service.url, headers, body)


def _entry(external: int) -> dict[str, str | int]:
    """Return the key of a mapping of ours."""
    return {"NewRemoteHost": "", "NewExternalPort": external, "NewProtocol": "TCP"}


async def _http(
    gateway: Gateway, method: str, url: str, headers: dict[str, str] | None = None, body: bytes = b""
) -> bytes:
    """Return the body of an answer, without redirect, proxy or compression, up to the limit of a description."""
    transport = httpx.AsyncHTTPTransport(local_address=gateway.own_address)
    client = httpx.AsyncClient(transport=transport, follow_redirects=False, trust_env=False, timeout=HTTP_S)
    asked = {**(headers or {}), "Accept-Encoding": "identity", "Connection": "close", "Host": urlsplit(url).netloc}
    try:
        with trio.fail_after(HTTP_S):
            async with client, client.stream(method, url, headers=asked, content=body) as response:
                document, status = await read_at_most(response, messages.DOCUMENT_MAX_BYTES), response.status_code
    except trio.TooSlowError:
        raise NoMapping("it answers too slowly") from None
    except MessageTooLarge:
        raise NoMapping("it answers with too many bytes") from None
    except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL, OSError) as error:
        raise NoMapping(f"it does not answer ({type(error).__name__})") from None
    if status == 500 and method == "POST":  # a fault in SOAP
        raise messages.read_fault(document)
    if status != 200:
        raise NoMapping(f"it answers with HTTP status {status}")
    return document
