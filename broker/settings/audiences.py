"""Who needs which setting: the order of docs/configuration.md."""

from typing import Final, NamedTuple

from broker.settings.config import Place


class Audience(NamedTuple):
    """It needs some settings. A member is a section, or a setting of a section, which counts before that section."""

    title: str
    words: str
    members: frozenset[str]


AUDIENCES: Final = (
    Audience(
        "For everyone",
        "Where a broker keeps its data and listens, what it declares, and who may do what.",
        frozenset(
            {
                *("data_dir", "namespace", "emulator", "queues", "topics"),
                *("amqp.host", "amqp.port", "amqp.tls_port", "amqp.max_message_size_bytes"),
                *("http.host", "http.port", "http.tls_port"),
                *("ops", "tls", "security", "log"),
            }
        ),
    ),
    Audience(
        "For applications that need another behaviour",
        "What a namespace does where an application needs something other than the default.",
        frozenset({"sku", "keep_case_of_names", "partitioning", "delivery", "forwarding", "expiry"}),
    ),
    Audience(
        "For operators of large installations",
        "How many processes there are, what clients may take, and when something is taken for dead. Change them when a "
        "measurement or a refusal asks for it.",
        frozenset(
            {
                *("partitions", "workers", "gateways", "idle_poll_us", "shutdown_timeout_ms"),
                *("worker_stall_timeout_ms", "worker_restart_wait_ms", "gateway_stall_timeout_ms"),
                *("amqp", "http", "store"),
            }
        ),
    ),
    Audience(
        "For clusters",
        "[A namespace on several machines](operating.md) has workers and gateways of its own.",
        frozenset({"cluster"}),
    ),
    Audience("For the journal", "[The journal](journal.md) is for audits, captures and Spark.", frozenset({"journal"})),
    Audience(
        "For pairing",
        "[A pair of namespaces](pairing.md) survives the loss of one; a broker may run its syphon.",
        frozenset({"syphon"}),
    ),
)


def audience_of(place: Place) -> Audience:
    """Return who needs the setting at `place`. Raises LookupError for a setting that nobody was named for."""
    for name in (".".join(map(str, place)), str(place[0])):
        for each in AUDIENCES:
            if name in each.members:
                return each
    raise LookupError(f"name in broker.settings.audiences who needs {place}")
