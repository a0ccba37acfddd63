"""The Noise session of a connection, after the handshake of `noise_xx`.

    length (2 bytes, big-endian) | ciphertext of at most 65519 bytes | tag (16)

- Each direction has a key and a nonce counter; a message that is forged, repeated, lost or out of order does not
  decrypt, and ends the connection (`NoiseBroken`). So does a counter that is used up.
- One read from the socket is up to 256 KiB, and every whole message in it is decrypted at once; one write carries
  several messages.
- While a long message arrives, the kernel gathers up to `GATHERED_MAX_BYTES` of it before it wakes us.
- The kernel's send buffer holds only what the link sends in a moment (`SendPace`), so a small frame does not wait
  behind megabytes, and a WANT can be cancelled until its answer leaves.

The payload of a Noise handshake in libp2p: a node's identity key and its signature over the static key. No I/O.

    identity_key = 1    a public key of libp2p: type (1, Ed25519) and 32 bytes
    identity_sig = 2    of "noise-libp2p-static-key:" and the 32 bytes of the X25519 static key
    extensions   = 4    ignored, early data included; so is every unknown field

- Only Ed25519 is supported: a node's identity is that key, and its id is derived from it.
- Each of the two fields occurs once. A payload that repeats a field, or is cut short, is refused.
- libsodium checks the signature and refuses keys of small order, as `protocol.wire.signing` does.
"""

import math
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import trio
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from libp2p.abc import IRawConnection, ISecureConn, ISecureTransport
from libp2p.connection_types import ConnectionType
from libp2p.crypto.ed25519 import Ed25519PublicKey
from libp2p.crypto.keys import KeyPair
from libp2p.custom_types import TProtocol
from libp2p.io.exceptions import IOException
from libp2p.io.trio import TrioTCPStream
from libp2p.io.utils import read_exactly
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.security.base_session import BaseSession
from libp2p.security.exceptions import HandshakeFailure
from multiaddr import Multiaddr
from nacl.exceptions import BadSignatureError
from nacl.exceptions import ValueError as WrongLength
from nacl.signing import VerifyKey

from protocol import limits
from protocol.errors import PeerFault
from swarm_node.p2p.noise_xx import KEY_BYTES, NoiseBroken, Role, XxHandshake

SIGNED_PREFIX = b"noise-libp2p-static-key:"
ED25519_PREFIX = b"\x08\x01\x12\x20"
"""Prefix of a public key as libp2p serialises it: type Ed25519, then 32 bytes."""

_IDENTITY_KEY, _IDENTITY_SIGNATURE = 1, 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_VARINT_MAX_BYTES = 10


def build_payload(identity: bytes, signature: bytes) -> bytes:
    """Return the payload of an Ed25519 public key and its signature over the static key."""
    key = ED25519_PREFIX + identity
    return bytes([_IDENTITY_KEY << 3 | _BYTES, len(key)]) + key + b"\x12" + bytes([len(signature)]) + signature


def verified_identity(payload: bytes, static: bytes) -> bytes:
    """Return the Ed25519 public key that signed this static key."""
    values: dict[int, bytes] = {}
    for number, value in _fields(payload):
        if number in (_IDENTITY_KEY, _IDENTITY_SIGNATURE):
            if number in values:
                raise NoiseBroken("The identity in the handshake is named twice.")
            values[number] = value
    key, signature = values.get(_IDENTITY_KEY, b""), values.get(_IDENTITY_SIGNATURE, b"")
    if len(key) != len(ED25519_PREFIX) + KEY_BYTES or not key.startswith(ED25519_PREFIX):
        raise NoiseBroken("The identity in the handshake is not an Ed25519 key.")
    identity = key.removeprefix(ED25519_PREFIX)
    try:
        VerifyKey(identity).verify(SIGNED_PREFIX + static, signature)
    except (BadSignatureError, WrongLength):
        raise NoiseBroken("The identity in the handshake has not signed the static key.") from None
    return identity


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the bytes of each field; the bytes are empty for fields of other types."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            start, (_, at) = at, _varint(data, at)
            size = 0
        elif kind == _BYTES:
            size, start = _varint(data, at)
        elif kind in (_FIXED64, _FIXED32):
            size, start = 8 if kind == _FIXED64 else 4, at
        else:
            raise NoiseBroken("The payload of the handshake is not a message of protobuf.")
        if kind != _VARINT:
            at = start + size
        if at > len(data) or not number:
            raise NoiseBroken("The payload of the handshake is cut short.")
        yield number, data[start : start + size] if kind == _BYTES else b""


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place in range(_VARINT_MAX_BYTES):
        if at + place >= len(data):
            break
        byte = data[at + place]
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    raise NoiseBroken("The payload of the handshake is cut short.")


PROTOCOL_ID = TProtocol("/noise")

PLAINTEXT_MAX_BYTES = 65519
READ_BYTES = 256 * 1024
UNSENT_MIN_BYTES, UNSENT_MAX_BYTES = 8 * 1024, 128 * 1024
"""Bounds of unsent bytes: a tenth of a second at 0.6 Mbit/s on the slowest links, half a write on the fastest."""

UNSENT_S = 0.08
"""Unsent data in the kernel, as seconds at the link's rate: longer than a wake-up takes on busy cores, so the link
never idles."""

PACE_S = 0.1
"""Interval over which the rate is measured: one write is not enough, since queues on the path absorb it at once."""

GATHERED_MIN_BYTES, GATHERED_MAX_BYTES = 1024, 64 * 1024
"""Fewer bytes are not worth a system call; more could look like silence on a link of a few kilobytes per second."""

_TAG_BYTES = 16
_NONCE_MAX = 2**64 - 1
"""Reserved by the specification, so one less than this is the last."""


class ConnectionLost(PeerFault):
    """The connection ended without a farewell."""

    code = "connection_lost"


class WrongPeer(PeerFault):
    """A different peer than the expected one answered at its address."""

    code = "wrong_peer"


class _Cipher:
    def __init__(self, key: bytes, nonce: int) -> None:
        self._cipher, self._nonce = ChaCha20Poly1305(key), nonce

    def _next_nonce(self) -> bytes:
        if self._nonce >= _NONCE_MAX:
            raise NoiseBroken("The nonces of this connection are used up.", hint="Connect again.")
        nonce, self._nonce = self._nonce, self._nonce + 1
        return b"\0\0\0\0" + nonce.to_bytes(8, "little")


class NoiseSealer(_Cipher):
    """Encrypts plaintexts to messages."""

    def seal(self, plaintexts: Iterable[bytes]) -> bytes:
        """Return the messages for the plaintexts, ready to send in this order."""
        parts: list[bytes] = []
        for plaintext in plaintexts:
            assert len(plaintext) <= PLAINTEXT_MAX_BYTES
            parts.append((len(plaintext) + _TAG_BYTES).to_bytes(2))
            parts.append(self._cipher.encrypt(self._next_nonce(), plaintext, None))
        return b"".join(parts)


class Opener(_Cipher):
    """Decrypts received bytes to plaintexts; holds at most one unfinished message."""

    def __init__(self, key: bytes, nonce: int) -> None:
        super().__init__(key, nonce)
        self._buffer = bytearray()

    def open(self, data: bytes) -> list[bytes]:
        """Return the plaintexts that `data` completes; after an error the opener must not be used."""
        self._buffer += data
        plaintexts: list[bytes] = []
        at = 0
        with memoryview(self._buffer) as view:
            while (body := at + 2) <= len(view) and (end := body + int.from_bytes(view[at:body])) <= len(view):
                plaintexts.append(self._decrypt(view[body:end]))
                at = end
        del self._buffer[:at]
        return plaintexts

    @property
    def missing(self) -> int:
        """Bytes missing until the next plaintext, as far as known."""
        announced = 2 + int.from_bytes(self._buffer[:2]) if len(self._buffer) >= 2 else 2
        return announced - len(self._buffer)

    def _decrypt(self, message: memoryview) -> bytes:
        with message:
            try:
                return self._cipher.decrypt(self._next_nonce(), message, None)
            except InvalidTag:
                raise NoiseBroken("A message does not decrypt: it was damaged, repeated or forged.") from None


class SendPace:
    """Unsent bytes that the kernel should hold: what the link recently sent in `UNSENT_S`."""

    def __init__(self) -> None:
        self._unsent_bytes = UNSENT_MIN_BYTES
        self._written, self._since = 0, -math.inf

    def write(self, size_bytes: int, now: float) -> int:
        """Record a write, with nearly all earlier bytes sent; return the unsent bytes that the kernel should hold."""
        if now >= self._since + PACE_S:
            wanted = int(UNSENT_S * self._written / (now - self._since))
            self._unsent_bytes = min(max(1 << wanted.bit_length() >> 1, UNSENT_MIN_BYTES), UNSENT_MAX_BYTES)
            self._written, self._since = 0, now
        self._written += size_bytes
        return self._unsent_bytes

    @property
    def write_bytes(self) -> int:
        """Size of one write: twice the unsent bytes, so that a write lasts longer than the wait for the next."""
        return 2 * self._unsent_bytes


class NoiseSession(BaseSession):
    """Secured connection: whole messages for the muxer, bytes for the negotiation before it."""

    def __init__(
        self, raw: IRawConnection, key_pair: KeyPair, remote: Ed25519PublicKey, keys: tuple[bytes, bytes]
    ) -> None:
        super().__init__(
            local_peer=ID.from_pubkey(key_pair.public_key),
            local_private_key=key_pair.private_key,
            remote_peer=ID.from_pubkey(remote),
            remote_permanent_pubkey=remote,
            is_initiator=raw.is_initiator,
        )
        to_send, to_receive = keys
        self._sealer, self._opener = NoiseSealer(to_send, 0), Opener(to_receive, 0)
        self._raw, self._socket = raw, _socket_under(raw)
        self._unread = bytearray()
        self._gathered = 1
        self._pace, self._unsent_bytes = SendPace(), 0

    async def receive(self) -> list[bytes]:
        """Return the plaintexts completed by the next bytes that arrive, or an empty list."""
        if self._unread:
            unread, self._unread = bytes(self._unread), bytearray()
            return [unread]
        return await self._next_plaintexts()

    async def _next_plaintexts(self) -> list[bytes]:
        data = await self._read_some()
        if not data:
            raise ConnectionLost("The connection ended without a farewell.")
        plaintexts = self._opener.open(data)
        self._wake_for(self._opener.missing)
        return plaintexts

    def _wake_for(self, missing: int) -> None:
        """Let the kernel gather the rest of a long message: else each packet of a slow link would wake us."""
        gathered = min(missing, GATHERED_MAX_BYTES) if missing >= GATHERED_MIN_BYTES else 1
        if self._socket is not None and gathered != self._gathered:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, gathered)
            self._gathered = gathered

    async def send(self, plaintexts: Iterable[bytes]) -> None:
        """Send some messages; if it is cancelled half way, the session must be closed."""
        sealed = self._sealer.seal(plaintexts)
        self._give_ahead(self._pace.write(len(sealed), trio.current_time()))
        await self._write_all(sealed)

    # Each layer of libp2p above the socket takes a lock, which is a turn of the event loop; one reader and one writer
    # need none.

    async def _read_some(self) -> bytes:
        if self._socket is None:
            return await self._raw.read(READ_BYTES)
        while True:
            await trio.lowlevel.wait_readable(self._socket)
            with suppress(BlockingIOError):
                return os.read(self._socket.fileno(), READ_BYTES)

    async def _write_all(self, data: bytes) -> None:
        if self._socket is None:
            await self._raw.write(data)
            return
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self._socket.fileno(), left) :]
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self._socket)

    def _give_ahead(self, unsent_bytes: int) -> None:
        if self._socket is not None and unsent_bytes != self._unsent_bytes:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, unsent_bytes)
            self._unsent_bytes = unsent_bytes

    async def writable(self) -> int:
        """Wait until the kernel has sent nearly all bytes; return how many bytes to send next."""
        if self._socket is not None:
            await trio.lowlevel.wait_writable(self._socket)
        return self._pace.write_bytes

    async def read(self, n: int | None = None) -> bytes:
        """Return exactly `n` bytes, or any available bytes without `n`."""
        while not self._unread or len(self._unread) < (n or 0):
            self._unread += b"".join(await self._next_plaintexts())
        wanted = len(self._unread) if n is None else n
        data = bytes(self._unread[:wanted])
        del self._unread[:wanted]
        return data

    async def write(self, data: bytes) -> None:
        await self.send([data[at : at + PLAINTEXT_MAX_BYTES] for at in range(0, len(data), PLAINTEXT_MAX_BYTES)])

    async def close(self) -> None:
        await self._raw.close()

    def get_remote_address(self) -> tuple[str, int] | None:
        return self._raw.get_remote_address()

    def get_transport_addresses(self) -> list[Multiaddr]:
        return self._raw.get_transport_addresses()

    def get_connection_type(self) -> ConnectionType:
        return self._raw.get_connection_type()


class Noise(ISecureTransport):
    """The Noise XX handshake of libp2p, in either role, with one static key for all connections.

    A handshake message is a length (2 bytes, big-endian) and that many bytes; no byte after it is read.
    """

    def __init__(self, key_pair: KeyPair) -> None:
        self._key_pair, self._static = key_pair, X25519PrivateKey.generate()
        signature = key_pair.private_key.sign(SIGNED_PREFIX + self._static.public_key().public_bytes_raw())
        self._payload = build_payload(key_pair.public_key.to_bytes(), signature)

    async def secure_inbound(self, conn: IRawConnection) -> ISecureConn:
        handshake = XxHandshake(Role.RESPONDER, self._static)
        with _reported_to_libp2p():
            handshake.read(await _read_message(conn))
            await _write_message(conn, handshake.write(self._payload))
            identity = verified_identity(handshake.read(await _read_message(conn)), handshake.remote_static)
        return NoiseSession(conn, self._key_pair, Ed25519PublicKey.from_bytes(identity), handshake.keys)

    async def secure_outbound(self, conn: IRawConnection, peer_id: ID) -> ISecureConn:
        handshake = XxHandshake(Role.INITIATOR, self._static)
        with _reported_to_libp2p():
            await _write_message(conn, handshake.write())
            identity = verified_identity(handshake.read(await _read_message(conn)), handshake.remote_static)
            remote = Ed25519PublicKey.from_bytes(identity)
            if ID.from_pubkey(remote) != peer_id:
                raise WrongPeer(f"Peer {ID.from_pubkey(remote)} answers instead of peer {peer_id}.")
            await _write_message(conn, handshake.write(self._payload))
        return NoiseSession(conn, self._key_pair, remote, handshake.keys)


@contextmanager
def _reported_to_libp2p() -> Iterator[None]:
    """Raise each failure as `HandshakeFailure`, after which libp2p closes the connection and frees its slot."""
    try:
        yield
    except (PeerFault, IOException) as error:
        raise HandshakeFailure("the Noise handshake failed") from error


async def _read_message(conn: IRawConnection) -> bytes:
    size = int.from_bytes(await read_exactly(conn, 2))
    if not 0 < size <= limits.HANDSHAKE_MESSAGE_MAX_BYTES:
        raise NoiseBroken(
            f"A handshake message of {size} bytes is announced; 1 to {limits.HANDSHAKE_MESSAGE_MAX_BYTES} are allowed."
        )
    return await read_exactly(conn, size)


async def _write_message(conn: IRawConnection, message: bytes) -> None:
    await conn.write(len(message).to_bytes(2) + message)


def _socket_under(raw: IRawConnection) -> trio.socket.SocketType | None:
    """Return the TCP socket of a connection; None for a pipe, or on a system without TCP_NOTSENT_LOWAT."""
    if not (isinstance(raw, RawConnection) and isinstance(raw.stream, TrioTCPStream)):
        return None
    tcp: trio.socket.SocketType | None = getattr(raw.stream.stream, "socket", None)
    return tcp if hasattr(socket, "TCP_NOTSENT_LOWAT") else None
