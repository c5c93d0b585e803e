"""Settings of who may do what."""

from typing import Annotated, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from broker.namespace.entities import AuthorizationRule, Frozen, Right
from broker.settings.fields import refuse_duplicates
from protocol.host_names import DEFAULT_HOST_NAMES, is_pattern

Secret = Annotated[str, StringConstraints(min_length=1, max_length=256)]


def _is_host_pattern(text: str) -> str:
    if not is_pattern(text):
        raise PydanticCustomError("host_pattern", "is no name of a host, nor one with *. before it")
    return text


HostPattern = Annotated[str, AfterValidator(_is_host_pattern)]


class Certificate(Frozen):
    """What the holders of certificates with one name may do."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=256)] = Field(
        description="The common name of the certificate, or an alternative name (DNS, URI, e-mail)."
    )
    rights: frozenset[Right] = Field(min_length=1, description="Any of Listen, Send and Manage.")
    entity: Annotated[str, StringConstraints(max_length=260)] | None = Field(
        None, description="The queue or topic that the rights are for; off is the whole namespace."
    )


class Security(Frozen):
    """Who may do what."""

    root_key: Secret | None = Field(
        None,
        repr=False,
        description="Key of RootManageSharedAccessKey; off makes a random key and keeps it in the file root-key of "
        "data_dir.",
    )
    root_secondary_key: Secret | None = Field(
        None,
        repr=False,
        description="A second key of RootManageSharedAccessKey, so that clients can change from one key to another; "
        "off takes the second line of the file root-key, if there is one.",
    )
    authorization_rules: tuple[AuthorizationRule, ...] = Field(
        (), max_length=12, description="Shared access keys for the whole namespace, beside the root key."
    )
    certificates: tuple[Certificate, ...] = Field(
        (),
        max_length=1000,
        description="Rights of clients by the names in their certificates, which an authority of tls.client_ca has "
        "signed. With SASL EXTERNAL, and with HTTP, they need no key.",
    )
    host_names: tuple[HostPattern, ...] = Field(
        DEFAULT_HOST_NAMES,
        max_length=1000,
        description="Names of the broker, such as `queues.example.com` or `*.example.com`, beside those of its "
        "certificate and the addresses that it listens on. A token whose resource has no scheme, as Go's programs make "
        "it, may begin with one of them; any other name is that of an entity.",
    )
    allow_anonymous: bool = Field(
        False, description="Let clients without a key do everything. For development; loopback addresses only."
    )

    @model_validator(mode="after")
    def _key_names_differ(self) -> Self:
        names = [rule.key_name for rule in self.authorization_rules]
        refuse_duplicates("authorization rule", "authorization_rules", ["RootManageSharedAccessKey", *names])
        held = [f"{each.name} at {each.entity or 'the namespace'}" for each in self.certificates]
        refuse_duplicates("certificate", "certificates", held)
        return self
