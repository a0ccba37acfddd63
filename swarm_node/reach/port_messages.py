"""Messages of PCP (RFC 6887) and NAT-PMP (RFC 6886): pure bytes, both on UDP port 5351 of the gateway.

- A reply is untrusted, and any host of the network may forge one: length, version, operation, port and, in PCP, the
  nonce must match the request; any other datagram is ignored.
- Only the needed part is implemented: one mapping of one TCP port. Lifetime 0 removes it.
"""

import struct
from ipaddress import IPv4Address, IPv6Address
from typing import NamedTuple

from swarm_node.reach.gateway import NoMapping

SERVER_PORT = 5351

PCP_VERSION, NATPMP_VERSION = 2, 0
MAP, MAP_TCP, ASK_ADDRESS = 1, 2, 0
REPLY = 128
TCP = 6

NONCE_BYTES = 12

_PCP_HEAD = struct.Struct("!BBHI16s")
_PCP_HEAD_REPLY = struct.Struct("!BBBBII12x")
_PCP_MAP = struct.Struct("!12sB3xHH16s")
_NATPMP_MAP = struct.Struct("!BBHHHI")
_NATPMP_MAP_REPLY = struct.Struct("!BBHIHHI")
_NATPMP_ADDRESS_REPLY = struct.Struct("!BBHI4s")

PCP_RESULTS = {
    1: "it does not speak this version",
    2: "it does not allow it",
    3: "it takes the request for malformed",
    4: "it does not know how to map",
    8: "it has no resources left",
    11: "it has no external address to give",
    12: "the address that it sees is another: there is a second router in between",
    13: "this machine has too many mappings",
}
NATPMP_RESULTS = {
    1: "it does not speak this version",
    2: "it does not allow it",
    3: "its line to the internet is down",
    4: "it has no resources left",
    5: "it does not know how to map",
}


class Granted(NamedTuple):
    """A mapping that a router grants."""

    port: int
    """The external port."""
    lease_s: int
    address: str = ""
    """The external address, if the protocol returns it with the mapping."""


def pcp_request(own_address: str, nonce: bytes, port: int, wanted_port: int, lease_s: int) -> bytes:
    """Build a MAP request of PCP."""
    head = _PCP_HEAD.pack(PCP_VERSION, MAP, 0, lease_s, _mapped(own_address))
    return head + _PCP_MAP.pack(nonce, TCP, port, wanted_port, _mapped("0.0.0.0"))


def read_pcp(data: bytes, nonce: bytes, port: int) -> Granted | None:
    """Read a reply to a MAP request; None if it is not such a reply."""
    if len(data) >= 4 and data[0] == NATPMP_VERSION and data[1] & REPLY:
        raise NoMapping("it does not speak this version")  # an older router, see RFC 6887, appendix A
    if len(data) < _PCP_HEAD_REPLY.size:
        return None
    version, operation, _, result, lease_s, _ = _PCP_HEAD_REPLY.unpack_from(data)
    if (version, operation) != (PCP_VERSION, REPLY | MAP):
        return None
    if len(data) < _PCP_HEAD_REPLY.size + _PCP_MAP.size:
        return None
    echoed, protocol, internal, external, address = _PCP_MAP.unpack_from(data, _PCP_HEAD_REPLY.size)
    if (echoed, protocol, internal) != (nonce, TCP, port):
        return None
    if result:
        raise NoMapping(PCP_RESULTS.get(result, f"it answers with code {result}"))
    ip = IPv6Address(address)
    return Granted(external, lease_s, str(ip.ipv4_mapped or ip))


def natpmp_request(port: int, wanted_port: int, lease_s: int) -> bytes:
    """Build a request of NAT-PMP to map a TCP port."""
    return _NATPMP_MAP.pack(NATPMP_VERSION, MAP_TCP, 0, port, wanted_port, lease_s)


def read_natpmp(data: bytes, port: int) -> Granted | None:
    """Read a reply to such a request; None if it is not such a reply."""
    if not _is_natpmp(data, MAP_TCP, _NATPMP_MAP_REPLY.size):
        return None
    _, _, _, _, internal, external, lease_s = _NATPMP_MAP_REPLY.unpack_from(data)
    return Granted(external, lease_s) if internal == port else None


def natpmp_address_request() -> bytes:
    """Build the request for the external address."""
    return bytes([NATPMP_VERSION, ASK_ADDRESS])


def read_natpmp_address(data: bytes) -> str | None:
    """Read the external address; None if this is no reply."""
    if not _is_natpmp(data, ASK_ADDRESS, _NATPMP_ADDRESS_REPLY.size):
        return None
    return str(IPv4Address(_NATPMP_ADDRESS_REPLY.unpack_from(data)[4]))


def _is_natpmp(data: bytes, operation: int, size: int) -> bool:
    """Return True for a whole reply to this operation; a refusal, which may be shorter, is raised."""
    if len(data) < 4 or data[0] != NATPMP_VERSION or data[1] != REPLY | operation:
        return False
    result = int.from_bytes(data[2:4], "big")
    if result:
        raise NoMapping(NATPMP_RESULTS.get(result, f"it answers with code {result}"))
    return len(data) >= size


def _mapped(address: str) -> bytes:
    return IPv6Address(f"::ffff:{address}").packed
