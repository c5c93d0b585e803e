"""Settings of the syphon that a broker runs."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints
from pydantic_core import PydanticCustomError

from broker.administration.address import parse_http_address
from broker.namespace.entities import Frozen
from protocol.client.connection_string import ConnectionString, InvalidConnectionString


def _is_connection_string(text: str) -> str:
    try:
        ConnectionString.parse(text)
    except InvalidConnectionString as error:
        raise PydanticCustomError("connection_string", "{text}", {"text": str(error)}) from None
    return text


def _is_http_address(text: str) -> str:
    try:
        parse_http_address(text)
    except ValueError as error:
        raise PydanticCustomError("http_address", "{text}", {"text": str(error)}) from None
    return text


class Syphon(Frozen):
    """A syphon that the broker runs, if its namespace has the backlog of another one."""

    primary: Annotated[str, StringConstraints(max_length=4096), AfterValidator(_is_connection_string)] | None = Field(
        None,
        repr=False,
        description="Connection string of the primary namespace, to which a process of this broker brings what is in "
        "the backlog here. It has a key, so the variable is a better place for it than a file that others may read.",
    )
    primary_http: Annotated[str, StringConstraints(max_length=1024), AfterValidator(_is_http_address)] | None = Field(
        None,
        description="Address of the primary for HTTP; off is http://HOST:5300 if its connection string is for plain "
        "AMQP, else https://HOST.",
    )
    primary_name: (
        Annotated[str, StringConstraints(max_length=200, pattern=r"^[A-Za-z0-9](?:[A-Za-z0-9_.~-]*[A-Za-z0-9_-])?$")]
        | None
    ) = Field(
        None,
        description="The primary's name in the paths of the backlog queues; off is the first part of its host name.",
    )
    backlog_queues: int = Field(10, ge=1, le=1000, description="Backlog queues of the pairing. Missing ones are made.")
    rate: float | None = Field(
        None, gt=0, le=1_000_000, description="Messages that it moves in a second, at most; off is no limit."
    )
    ca: Path | None = Field(
        None, description="PEM file of the authorities to trust with TLS to the primary; off trusts the system's."
    )
