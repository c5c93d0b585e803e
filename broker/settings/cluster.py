"""Settings of a namespace on several machines."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from broker.namespace.entities import SECOND_MS, Frozen
from broker.settings.addresses import parse_address
from broker.settings.fields import MAX_PARTITIONS, inconsistent, refuse_duplicates


def _is_address(text: str) -> str:
    try:
        parse_address(text)
    except ValueError as error:
        raise PydanticCustomError("address", "{text}", {"text": str(error)}) from None
    return text


HostAndPort = Annotated[str, AfterValidator(_is_address)]


class Cluster(Frozen):
    """A namespace on several machines: for `peeklock worker` and `peeklock gateway`."""

    workers: tuple[HostAndPort, ...] = Field(
        (), max_length=MAX_PARTITIONS, description="Addresses of all workers of the namespace, as host:port."
    )
    listen: HostAndPort | None = Field(None, description="Address at which this worker listens, as host:port.")
    owned: tuple[Annotated[int, Field(ge=0, lt=MAX_PARTITIONS)], ...] = Field(
        (),
        max_length=MAX_PARTITIONS,
        description="Partitions of this worker; partition 0 is the home of the namespace.",
    )
    journals: tuple[HostAndPort, ...] = Field(
        (),
        max_length=MAX_PARTITIONS,
        description="Addresses of the workers' journals, as host:port, in the order of `cluster.workers`.",
    )
    journal_listen: HostAndPort | None = Field(
        None, description="Address at which the journal of this worker listens, as host:port."
    )
    heartbeat_timeout_ms: int = Field(
        10 * SECOND_MS,
        ge=3 * SECOND_MS,
        le=10 * SECOND_MS,
        description="Processes on several machines give each other a sign of life each second. One from which nothing "
        "has come for this long is taken for dead, as if its machine had lost its power. A worker that only waits for "
        "its disk is not: worker_stall_timeout_ms says how long it may. The same in all processes of the namespace.",
    )
    certificate: Path | None = Field(
        None,
        description="PEM file with the certificate, and its chain, that this process shows to the others. A worker's "
        "has the name by which the others reach it.",
    )
    key: Path | None = Field(None, description="PEM file with the certificate's private key.")
    ca: Path | None = Field(
        None, description="PEM file of the authorities whose certificates the other processes must have."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        refuse_duplicates("worker", "workers", [str(parse_address(each)).lower() for each in self.workers])
        refuse_duplicates("partition", "owned", [str(each) for each in self.owned])
        refuse_duplicates("journal", "journals", [str(parse_address(each)).lower() for each in self.journals])
        if self.journals and len(self.journals) != len(self.workers):
            raise inconsistent(
                f"has {len(self.journals)} addresses, and there are {len(self.workers)} workers; each has a journal of "
                "its own, in the same order",
                "journals",
            )
        files = {"certificate": self.certificate, "key": self.key, "ca": self.ca}
        missing = [name for name, path in files.items() if path is None]
        if missing and len(missing) < len(files):
            raise inconsistent(f"is missing; certificate, key and ca belong together, {missing[0]} too", missing[0])
        if missing:
            addresses = [
                *(("workers", each) for each in self.workers),
                *(("journals", each) for each in self.journals),
                *(("listen", self.listen), ("journal_listen", self.journal_listen)),
            ]
            for name, text in addresses:
                if text is not None and not parse_address(text).is_loopback:
                    raise inconsistent(
                        f"has {text}: beyond this machine the processes need cluster.certificate, key and ca", name
                    )
        return self
