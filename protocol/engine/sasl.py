"""The SASL layer below an AMQP connection, for both sides: bytes in, bytes out (AMQP 1.0 5.3).

It has only mechanisms that need one message, so the server never sends a challenge. Bytes that the peer pipelines
behind the layer are in `rest`, which begins with the AMQP protocol header.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from protocol.codec import Array, Described, Symbol, UByte, array, decode_exactly, encode
from protocol.errors import ProtocolError
from protocol.symbols import AMQP_HEADER, DESCRIPTOR_OF, Descriptor

SASL_HEADER: Final = b"AMQP\x03\x01\x00\x00"

ANONYMOUS: Final = "ANONYMOUS"
PLAIN: Final = "PLAIN"
EXTERNAL: Final = "EXTERNAL"
CLAIMS: Final = "MSSBCBS"  # anonymous, followed by claims; the only mechanism that .NET knows
MECHANISMS: Final = (CLAIMS, PLAIN, ANONYMOUS, EXTERNAL)

# 5.3.1 says 512, but a key name and a key of 256 characters each may need more.
MAX_FRAME_BYTES = 4096

_MECHANISMS, _INIT, _OUTCOME = Descriptor.SASL_MECHANISMS, Descriptor.SASL_INIT, Descriptor.SASL_OUTCOME
_OK, _AUTH = 0, 1
_FRAME_TYPE = 1


class SaslError(ProtocolError):
    """The peer does not follow the protocol: close the connection."""


class SaslRefused(SaslError):
    """The server refuses the client. `code` is that of its outcome, or None if it does not offer the mechanism."""

    def __init__(self, reason: str, code: int | None = None) -> None:
        super().__init__(reason)
        self.code = code


class IdentityKind(Enum):
    ANONYMOUS = "anonymous"
    KEY = "key"
    EXTERNAL = "external"


@dataclass(frozen=True, slots=True)
class Identity:
    """Who the client is: no one, the holder of the key called `name`, or the subject `name` of its TLS certificate."""

    kind: IdentityKind
    name: str = ""
    rights: frozenset[str] = frozenset()


# (key name, key) -> the identity of kind KEY, or None if they do not match.
VerifyPlain = Callable[[str, str], Identity | None]


class SaslServer:
    """The server's side.

    Feed it arriving bytes until `finished`. Then `identity` says who the client is; if it is None the client is
    refused: write what `feed` returned and close. `rest` has the bytes behind the layer. It keeps at most one frame of
    the peer.
    """

    def __init__(
        self,
        verify_plain: VerifyPlain,
        external: str | None = None,
        mechanisms: Sequence[str] = MECHANISMS,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        """`external` is the subject that TLS has verified, without which EXTERNAL fails."""
        self.identity: Identity | None = None
        self.finished = False
        self.rest = b""
        self._verify_plain = verify_plain
        self._external = external
        self._mechanisms = mechanisms
        self._max_frame_bytes = max_frame_bytes
        self._buffer = b""
        self._greeted = False

    def feed(self, data: bytes) -> bytes:
        """Take arriving bytes, and return the bytes to write. Raises SaslError, DecodeError or LimitExceeded."""
        assert not self.finished, "the SASL layer is finished"
        self._buffer += data
        answer = b""
        if not self._greeted:
            header = self._buffer[:8]
            if not AMQP_HEADER.startswith(header) and not SASL_HEADER.startswith(header):
                # 2.2: the answer to an unsupported header is a supported one.
                self._finish(None)
                return SASL_HEADER
            if len(header) < 8:
                return b""
            if header == AMQP_HEADER:
                self._finish(Identity(IdentityKind.ANONYMOUS))
                return b""
            self._greeted = True
            self._buffer = self._buffer[8:]
            offered = array(Symbol, self._mechanisms)
            answer = SASL_HEADER + _encode_frame(_MECHANISMS, [offered])
        body, self._buffer = _take_frame(self._buffer, self._max_frame_bytes)
        if body is None:
            return answer
        self._finish(self._authenticate(_decode_body(body, _INIT)))
        # Two fields although the second is null, because azure-servicebus prints both when it is refused.
        return answer + _encode_frame(_OUTCOME, [UByte(_OK if self.identity else _AUTH), None])

    def end(self) -> None:
        """The connection is gone."""
        del self._verify_plain
        self._buffer = b""

    def _finish(self, identity: Identity | None) -> None:
        self.finished = True
        self.identity = identity
        self.rest = self._buffer if identity else b""
        self._buffer = b""

    def _authenticate(self, fields: list[Any]) -> Identity | None:
        mechanism = fields[0] if fields else None
        response = fields[1] if len(fields) > 1 else None
        if not isinstance(mechanism, str):
            raise SaslError("sasl-init names no mechanism")
        if response is not None and not isinstance(response, bytes):
            raise SaslError("the initial response of sasl-init is not binary")
        if mechanism not in self._mechanisms:
            return None
        if mechanism in (CLAIMS, ANONYMOUS):
            return Identity(IdentityKind.ANONYMOUS)
        if mechanism == EXTERNAL:
            return Identity(IdentityKind.EXTERNAL, self._external) if self._external else None
        credentials = parse_plain(response or b"")
        return self._verify_plain(*credentials) if credentials else None


class SaslClient:
    """The client's side: write `start()`, then feed it arriving bytes until `finished`. `rest` is as in SaslServer."""

    def __init__(
        self,
        mechanism: str,
        response: bytes = b"",
        hostname: str | None = None,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self.finished = False
        self.rest = b""
        self._mechanism = mechanism
        self._response = response
        self._hostname = hostname
        self._max_frame_bytes = max_frame_bytes
        self._buffer = b""
        self._greeted = False
        self._answered = False

    def start(self) -> bytes:
        return SASL_HEADER

    def feed(self, data: bytes) -> bytes:
        """Take arriving bytes, return those to write. Raises SaslRefused, SaslError, DecodeError, LimitExceeded."""
        assert not self.finished, "the SASL layer is finished"
        self._buffer += data
        if not self._greeted:
            header = self._buffer[:8]
            if not SASL_HEADER.startswith(header):
                raise SaslError(f"the server answers with the protocol header {header.hex()}")
            if len(header) < 8:
                return b""
            self._greeted = True
            self._buffer = self._buffer[8:]
        answer = b""
        if not self._answered:
            body, self._buffer = _take_frame(self._buffer, self._max_frame_bytes)
            if body is None:
                return b""
            self._check_offer(_decode_body(body, _MECHANISMS))
            self._answered = True
            answer = _encode_frame(_INIT, [Symbol(self._mechanism), self._response, self._hostname])
        body, self._buffer = _take_frame(self._buffer, self._max_frame_bytes)
        if body is not None:
            self._check_outcome(_decode_body(body, _OUTCOME))
            self.finished = True
            self.rest, self._buffer = self._buffer, b""
        return answer

    def _check_offer(self, fields: list[Any]) -> None:
        offered = fields[0] if fields else None
        if isinstance(offered, str):  # a single symbol may come without an array (1.4)
            offered = [offered]
        if not isinstance(offered, list | Array):
            raise SaslError("sasl-mechanisms names no mechanism")
        if self._mechanism not in offered:
            raise SaslRefused(f"the server does not offer {self._mechanism} but {', '.join(map(str, offered))}")

    def _check_outcome(self, fields: list[Any]) -> None:
        code = fields[0] if fields else None
        if not isinstance(code, int):
            raise SaslError("sasl-outcome has no code")
        if code != _OK:
            reason = "the server refuses the credentials" if code == _AUTH else "the server failed to authenticate"
            raise SaslRefused(f"{reason} (SASL outcome {code})", code)


def plain_response(key_name: str, key: str) -> bytes:
    """The initial response of PLAIN (RFC 4616)."""
    return b"\0%b\0%b" % (key_name.encode(), key.encode())


def parse_plain(response: bytes) -> tuple[str, str] | None:
    """Key name and key, or None if the response is not that of PLAIN or asks to act as someone else."""
    try:
        parts = response.decode().split("\0")
    except UnicodeDecodeError:
        return None
    if len(parts) != 3 or parts[0] not in ("", parts[1]):
        return None
    return parts[1], parts[2]


def _encode_frame(code: int, fields: list[Any]) -> bytes:
    body = encode(Described(code, fields))
    return (len(body) + 8).to_bytes(4, "big") + bytes((2, _FRAME_TYPE, 0, 0)) + body


def _take_frame(data: bytes, max_bytes: int) -> tuple[bytes | None, bytes]:
    """The body of the first frame, or None while it is incomplete; and the remaining bytes. Raises SaslError."""
    if len(data) < 8:
        return None, data
    size = int.from_bytes(data[:4], "big")
    offset = 4 * data[4]
    if size > max_bytes:
        raise SaslError(f"SASL frame of {size} bytes; the limit is {max_bytes}")
    if not 8 <= offset <= size:
        raise SaslError(f"SASL frame of {size} bytes whose body begins at {offset}")
    if data[5] != _FRAME_TYPE:
        raise SaslError(f"frame of type {data[5]} within the SASL layer")
    if len(data) < size:
        return None, data
    return data[offset:size], data[size:]


def _decode_body(body: bytes, code: int) -> list[Any]:
    """The fields of performative `code`. Raises SaslError, DecodeError or LimitExceeded."""
    frame = decode_exactly(body)
    if not isinstance(frame, Described) or not isinstance(frame.value, list):
        raise SaslError("SASL frame without a performative")
    descriptor = DESCRIPTOR_OF.get(frame.descriptor) if isinstance(frame.descriptor, str) else frame.descriptor
    if descriptor != code:
        raise SaslError(f"SASL performative {frame.descriptor!r} where {code:#04x} is due")
    return frame.value
