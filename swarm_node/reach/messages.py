"""Messages to a router that may forward a port: PCP (RFC 6887), NAT-PMP (RFC 6886) and UPnP's IGD. Pure bytes.

PCP and NAT-PMP both use UDP port 5351 of the gateway.

- A reply is untrusted, and any host of the network may forge one: length, version, operation, port and, in PCP, the
  nonce must match the request; any other datagram is ignored.
- Only the needed part is implemented: one mapping of one TCP port. Lifetime 0 removes it.

The Internet Gateway Device has the search, the description, and three actions in SOAP.

- All data comes from an untrusted router. XML is parsed without document types, so there are no entities to expand;
  elements are counted; only three kinds of text are kept, with a limited length.
- The description contains the URL of actions; only the router's own address is accepted.
"""

import struct
from ipaddress import IPv4Address, IPv6Address
from typing import NamedTuple
from urllib.parse import urljoin, urlsplit
from xml.parsers import expat
from xml.sax.saxutils import escape

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


GROUP, GROUP_PORT = "239.255.255.250", 1900

TARGETS = (
    "urn:schemas-upnp-org:device:InternetGatewayDevice:1",
    "urn:schemas-upnp-org:device:InternetGatewayDevice:2",
)
SERVICES = (
    "urn:schemas-upnp-org:service:WANIPConnection:2",
    "urn:schemas-upnp-org:service:WANIPConnection:1",
    "urn:schemas-upnp-org:service:WANPPPConnection:1",
)
"""Services that map ports; the first that a router has is used."""

DOCUMENT_MAX_BYTES = 128 * 1024
"""Limit of a description: those of real routers have 5 to 40 kB."""

ELEMENTS_MAX = 5_000
"""Elements of a document: ten times as many as real descriptions have."""

TEXT_MAX_CHARS = 512
"""Limit of a kept text: a path, an address or a code."""

PERMANENT_LEASES_ONLY, CONFLICT = "725", "718"


class Service(NamedTuple):
    """Service of a router, with the URL of its actions."""

    kind: str
    url: str


class RouterFault(NoMapping):
    """The router answered an action with a fault."""

    def __init__(self, code: str, words: str) -> None:
        super().__init__(f"it answers with fault {code or 'without a code'}" + (f" ({words[:80]})" if words else ""))
        self.code = code


def search_request(target: str) -> bytes:
    """Build the search for Internet gateways in this network."""
    lines = ("M-SEARCH * HTTP/1.1", f"HOST: {GROUP}:{GROUP_PORT}", 'MAN: "ssdp:discover"', "MX: 1", f"ST: {target}")
    return "\r\n".join((*lines, "", "")).encode()


def read_search(data: bytes, router: str) -> str | None:
    """Return the URL of a router's description; None if this is no answer of a gateway device at `router`."""
    head, *lines = data.decode("latin-1").split("\r\n")
    fields = {name.strip().upper(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    location = fields.get("LOCATION", "")
    if not head.startswith("HTTP/1.") or " 200" not in head or fields.get("ST") not in TARGETS:
        return None
    return at_router(location, router)


def at_router(url: str, router: str) -> str | None:
    """Return a rebuilt URL at the router's own address; None for HTTPS, names and other addresses."""
    try:
        parts = urlsplit(url)
        port = parts.port or 80
    except ValueError:
        return None
    if parts.scheme != "http" or parts.hostname != router or "@" in parts.netloc:
        return None
    return f"http://{router}:{port}{parts.path or '/'}{'?' + parts.query if parts.query else ''}"


def read_description(document: bytes, base: str, router: str) -> Service:
    """Return the service that maps ports."""
    urls: dict[str, str] = {}
    kind = ""
    for name, text in _texts(document, {"serviceType", "controlURL"}):
        if name == "serviceType":
            kind = text
        elif kind in SERVICES:
            urls.setdefault(kind, text)
            kind = ""
    for kind in SERVICES:
        if kind in urls:
            try:
                url = at_router(urljoin(base, urls[kind]), router)
            except ValueError:
                continue
            if url is not None:
                return Service(kind, url)
    raise NoMapping("its description names no service that maps ports")


def action_request(service: Service, action: str, **arguments: str | int) -> tuple[dict[str, str], bytes]:
    """Build headers and body of an action."""
    inner = "".join(f"<{name}>{escape(str(value))}</{name}>" for name, value in arguments.items())
    body = (
        '<?xml version="1.0"?>\r\n<s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/" '
        's:encodingStyle="http://schemas.xmlsoap.org/soap/encoding/"><s:Body>'
        f'<u:{action} xmlns:u="{service.kind}">{inner}</u:{action}></s:Body></s:Envelope>\r\n'
    )
    headers = {"Content-Type": 'text/xml; charset="utf-8"', "SOAPAction": f'"{service.kind}#{action}"'}
    return headers, body.encode()


def read_fault(document: bytes) -> RouterFault:
    """Return the fault in an answer."""
    values = dict(_texts(document, {"errorCode", "errorDescription"}))
    return RouterFault(values.get("errorCode", ""), values.get("errorDescription", ""))


def read_value(document: bytes, name: str) -> str:
    """Return one value of an answer; empty if it is not in it."""
    return dict(_texts(document, {name})).get(name, "")


def _texts(document: bytes, wanted: set[str]) -> list[tuple[str, str]]:
    """Return the text of each element with one of these names, whatever its prefix, in the order of the document."""
    texts: list[tuple[str, str]] = []
    open_names: list[str] = []
    pieces: list[str] = []
    elements = 0
    parser = expat.ParserCreate()

    def start(name: str, _attributes: dict[str, str]) -> None:
        nonlocal elements
        elements += 1
        if elements > ELEMENTS_MAX:
            raise NoMapping("its XML has too many elements")
        open_names.append(name.rpartition(":")[2])
        pieces.clear()

    def end(_name: str) -> None:
        name = open_names.pop()
        if name in wanted:
            texts.append((name, "".join(pieces).strip()[:TEXT_MAX_CHARS]))
        pieces.clear()

    def refuse(*_arguments: object) -> None:
        raise NoMapping("its XML declares a document type")

    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.CharacterDataHandler = pieces.append
    parser.StartDoctypeDeclHandler = refuse
    try:
        parser.Parse(document, True)
    except (expat.ExpatError, LookupError, ValueError) as error:
        raise NoMapping(f"its XML cannot be read: {error}") from None
    return texts
