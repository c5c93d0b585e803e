"""Shared access signatures: tokens by which the holder of a key grants a resource until a time.

    SharedAccessSignature sr=<enc(resource)>&sig=<enc(base64 signature)>&se=<unix seconds>&skn=<enc(key name)>

The signature is HMAC-SHA-256 over the `sr` text exactly as it stands in the token, a line feed, and `se`; its key is
the text of the shared access key, not its bytes decoded from base64.

A resource is a URI whose scheme and host are ignored. Some signers leave out the scheme (`host/queue`, or `host` for
the namespace). Such a host must not be mistaken for a path, nor a path for a host, which would mean the whole
namespace: `protocol.host_names` tells them apart.
"""

import base64
import binascii
import hmac
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

from protocol import error_texts
from protocol.errors import ProtocolError
from protocol.host_names import DEFAULT_HOST_NAMES, HostNames, is_pattern

PREFIX: Final = "SharedAccessSignature "
MAX_TOKEN_CHARACTERS = 8192

_ORIGIN: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/]*")
_EXPIRY: Final = re.compile(r"[0-9]{1,15}")


class TokenError(ProtocolError):
    """The token grants nothing. The text begins with the name of the error, as clients know it."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{type(self).__name__}: {reason}")
        self.reason = reason


class MissingToken(TokenError): ...


class MalformedToken(TokenError): ...


class InvalidSignature(TokenError): ...


class ExpiredToken(TokenError):
    def __init__(self, expires_s: float) -> None:
        super().__init__(error_texts.token_expired(expires_s))


class InvalidAudience(TokenError): ...


class KeyRule(NamedTuple):
    """An authorization rule: its keys (primary, then secondary if there is one) and the names of its rights."""

    keys: tuple[str, ...]
    rights: frozenset[str]


# True if the first segment of a URI without a scheme is a host, perhaps with a port, and no part of an entity's path.
# It is `HostNames.has`.
IsHost = Callable[[str], bool]
_DEFAULT_NAMES: Final = HostNames(DEFAULT_HOST_NAMES).has

# (key name, audience path) -> the rules with that name at the path and above it, up to the namespace.
KeyLookup = Callable[[str, str], Sequence[KeyRule]]

_NO_RULE: Final = KeyRule(("",), frozenset())


@dataclass(frozen=True, slots=True)
class Claim:
    """The grant of a verified token: `rights` at `path` until `expires_s` (Unix seconds).

    `path` is that of the audience, never the wider resource of the token. A rule of one entity may sign any resource,
    but it grants nothing outside of that entity.
    """

    path: str
    key_name: str
    key: str = field(repr=False)  # the one of the rule's keys that has signed the token
    rights: frozenset[str]
    expires_s: int


class Token(NamedTuple):
    """The parts of a token, not verified."""

    resource: str  # as in the token, still encoded
    signature: bytes
    expires: str  # Unix seconds, as in the token
    key_name: str


def parse(token: str) -> Token:
    """Read the fields of a token, and verify nothing. Raises MalformedToken."""
    if len(token) > MAX_TOKEN_CHARACTERS:
        raise MalformedToken(f"The token is longer than {MAX_TOKEN_CHARACTERS} characters.")
    if not token.startswith(PREFIX):
        raise MalformedToken("The token does not begin with 'SharedAccessSignature'.")
    fields: dict[str, str] = {}
    for parameter in token.removeprefix(PREFIX).strip().split("&"):
        name, _, value = parameter.partition("=")
        if name in fields:
            raise MalformedToken(f"The parameter '{name}' is given more than once.")
        fields[name] = value
    for name in ("sr", "sig", "se", "skn"):
        if not fields.get(name):
            raise MalformedToken(f"The parameter '{name}' is missing.")
    if not _EXPIRY.fullmatch(fields["se"]):
        raise MalformedToken("The parameter 'se' is not a time in seconds since 1970.")
    try:
        signature = base64.b64decode(unquote(fields["sig"]), validate=True)
    except (binascii.Error, ValueError):
        raise MalformedToken("The parameter 'sig' is not base64.") from None
    return Token(fields["sr"], signature, fields["se"], unquote(fields["skn"]))


def verify(token: str, audience: str, lookup: KeyLookup, now_s: float, is_host: IsHost = _DEFAULT_NAMES) -> Claim:
    """The grant of `token` at `audience`, a URI or a path. Raises a TokenError."""
    path = resource_path(audience, is_host)
    parsed = parse(token)
    rules = lookup(parsed.key_name, path)
    # Refusing an unknown name takes as long as refusing a wrong key.
    signers = [
        (rule, key)
        for rule in rules or (_NO_RULE,)
        for key in rule.keys
        if hmac.compare_digest(_sign(parsed.resource, parsed.expires, key), parsed.signature)
    ]
    if not rules or not signers:
        raise InvalidSignature("The token has an invalid signature.")
    expires_s = int(parsed.expires)
    if expires_s <= now_s:
        raise ExpiredToken(expires_s)
    if not covers(resource_path(unquote(parsed.resource), is_host), path):
        raise InvalidAudience(f"The token does not cover '{path[:260]}'.")
    rights = frozenset[str]().union(*(rule.rights for rule, _ in signers))
    return Claim(path, parsed.key_name, signers[0][1], rights, expires_s)


def is_signed_with(token: str, key: str) -> bool:
    """True if that key has signed the token, which may be over. Raises MalformedToken."""
    parsed = parse(token)
    return hmac.compare_digest(_sign(parsed.resource, parsed.expires, key), parsed.signature)


def generate(resource: str, key_name: str, key: str, expires_s: int) -> str:
    """A token for `resource` (a URI such as sb://host/entity) that ends at `expires_s` (Unix seconds)."""
    encoded, expires = quote(resource, safe=""), str(expires_s)
    signature = base64.b64encode(_sign(encoded, expires, key)).decode()
    return f"{PREFIX}sr={encoded}&sig={quote(signature, safe='')}&se={expires}&skn={quote(key_name, safe='')}"


def unknown_host(uri: str, is_host: IsHost) -> str | None:
    """The first segment of `uri`, if it was taken for a part of a path and may have been meant as a host."""
    first = uri.partition("?")[0].partition("/")[0]
    return first if is_pattern(first) and not is_host(first) else None


def resource_of(token: str) -> str:
    """The resource that a token is for. Raises MalformedToken."""
    return unquote(parse(token).resource)


def resource_path(uri: str, is_host: IsHost = _DEFAULT_NAMES) -> str:
    """The path in `uri`, for comparison: decoded, in lower case, without slashes around it or `/$management`.

    Scheme, host, port and query are ignored; the namespace itself is the empty path. Without a scheme, `is_host`
    decides whether the first segment is a host.
    """
    uri = uri.partition("?")[0]
    origin = _ORIGIN.match(uri)
    path = uri[origin.end() :] if origin else uri
    if origin is None:
        first, _, rest = path.partition("/")
        path = rest if is_host(first) else path
    path = unquote(path).strip("/").lower()
    return "" if path == "$management" else path.removesuffix("/$management")


def covers(scope: str, path: str) -> bool:
    """True if `path` is `scope` or below it; both are results of `resource_path`."""
    return not scope or path == scope or path.startswith(scope + "/")


def _sign(resource: str, expires: str, key: str) -> bytes:
    return hmac.digest(key.encode(), f"{resource}\n{expires}".encode(errors="surrogatepass"), "sha256")
