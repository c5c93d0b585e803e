"""What a client has shown of itself by SASL and TLS, and the rights that it has by that."""

from collections.abc import Collection

from broker.gateway.rights import NOT_THE_EMULATORS, Proof, Rights, entity_of
from broker.keys import EMULATOR_KEY, Keyring
from protocol.engine.sasl import Identity, IdentityKind


class Credentials:
    """The credentials of one connection. `names` are those of the client's certificate.

    `problem`: why authentication failed, for the log. `has_key`: SASL has shown the key of a rule.
    """

    __slots__ = ("_keyring", "_names", "_rights", "has_key", "problem")

    def __init__(self, keyring: Keyring, names: Collection[str], rights: Rights) -> None:
        """`rights` get what the credentials give."""
        self._keyring = keyring
        self._names = names
        self._rights = rights
        self.problem = "SASL"
        self.has_key = False

    @property
    def external(self) -> str:
        """Who the client is by its certificate; empty if it is nobody by that."""
        return ", ".join(sorted(self._names))

    def verify_plain(self, key_name: str, key: str) -> Identity | None:
        """Take the rights of this key. None if no rule of this name has it."""
        grants = self._keyring.verify_plain(key_name, key)
        if not grants and key == EMULATOR_KEY:
            self.problem = NOT_THE_EMULATORS
        for grant in grants:
            self._rights.grant(grant.entity or "", grant.rights, Proof(key_name, key))
        return Identity(IdentityKind.KEY, key_name) if grants else None

    def accept(self, identity: Identity) -> None:
        """SASL is over. A client that wants to be who its certificate says gets the rights of that.

        If the certificate has none, the client can still put tokens.
        """
        self.has_key = identity.kind is IdentityKind.KEY
        if identity.kind is IdentityKind.EXTERNAL:
            for grant in self._keyring.of_certificate(self._names):
                self._rights.grant(grant.entity or "", grant.rights, None)

    def granted_now(self, path: str, proof: Proof | None) -> frozenset[str]:
        """The rights that the proof, or else the certificate, gives at this path by the rules that there are now."""
        if proof is not None:
            return self._keyring.rights_of(proof.key_name, proof.key, entity_of(path))
        grants = self._keyring.of_certificate(self._names)
        return frozenset().union(*(each.rights for each in grants if (each.entity or "") == path))
