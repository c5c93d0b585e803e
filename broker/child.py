"""How a gateway or worker process gets its instructions and answers its supervisor.

The supervisor starts `python -m broker.worker`, `-m broker.gateway`, or `-m broker.one_process`, which is both, and
`-m broker.observer`, which has the operations endpoint where no gateway has it for all, `-m broker.inner_syphon`, and
`-m broker.journal`. The first ones are copies of its own process that run the same (`broker.supervisor.interpreters`).
It writes one line of JSON to the standard input, and reads one line of JSON from the standard output: either that the
process serves, or why it never can.

    instructions = read_instructions()
    try:
        ...                                          # open stores, listen
    except ConfigurationError as error:
        fail(str(error))
    announce_ready(amqp_port=port)

Each process gives signs of life on the same pipe, too (`broker.pulse`): from its start on whenever it makes progress,
and when it serves about each second, as long as its loop makes turns.

A child must not outlive its supervisor, because the next supervisor needs the ports and the stores. So the kernel kills
the child when its supervisor dies.
"""

import gc
import json
import os
import signal
import sys
from dataclasses import dataclass
from typing import Any, NoReturn

from broker.pulse import Pulse as Pulse
from broker.settings.config import Settings
from storage.heap import Freed as Freed
from storage.heap import give_back_freed as give_back_freed
from storage.heap import keep_freed as keep_freed
from storage.parent import die_with_parent

PERMANENT_FAULT = 78  # EX_CONFIG of sysexits.h: another start without a change would fail again
NO_ROOM = 75  # EX_TEMPFAIL: the disk is full, and another start may find room
DAMAGED_STORE = 65  # EX_DATAERR: the content of a store makes no sense


def gateway_process(number: int) -> str:
    """The name of a gateway in logs and metrics: most brokers have only one."""
    return "gateway" if number == 0 else f"gateway-{number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Instructions:
    """The instructions for one child.

    `sockets` are the paths of the workers' unix sockets, relative to the working directory; the index is the worker.
    Partition p is on worker p % len(sockets). A gateway has `gateway`, its number, and a worker has `worker`. The other
    is None, unless one process is both; both are None for an observer and a syphon. `partitions` are those of the
    worker, and of the observer beside a worker; else they are empty. With an observer of gateways, `gateway_sockets`
    are the paths where these report to it; the index is the gateway. `syphon_socket` is where the syphon reports to the
    process with the operations endpoint; empty without a syphon; `journal_socket` is the same of the journal. In
    `settings` the root key is always set, paths are absolute, and `queues` is empty: entities are in the stores.
    """

    settings: Settings
    supervisor: int  # process id
    gateway: int | None
    worker: int | None
    partitions: tuple[int, ...]
    sockets: tuple[str, ...]
    restarts: int  # how often this child was restarted
    parked: tuple[int, ...] = ()  # those of `partitions` whose stores are damaged and stay closed
    gateway_sockets: tuple[str, ...] = ()
    syphon_socket: str = ""
    journal_socket: str = ""
    directory: str = "."  # the working directory from now on

    def to_json(self) -> str:
        return json.dumps(
            {
                "settings": self.settings.model_dump(mode="json"),
                "supervisor": self.supervisor,
                "gateway": self.gateway,
                "worker": self.worker,
                "partitions": self.partitions,
                "sockets": self.sockets,
                "restarts": self.restarts,
                "parked": self.parked,
                "gateway_sockets": self.gateway_sockets,
                "syphon_socket": self.syphon_socket,
                "journal_socket": self.journal_socket,
                "directory": self.directory,
            }
        )

    @classmethod
    def from_json(cls, line: str) -> "Instructions":
        fields = json.loads(line)
        return cls(
            settings=Settings.model_validate(fields["settings"]),
            supervisor=fields["supervisor"],
            gateway=fields["gateway"],
            worker=fields["worker"],
            partitions=tuple(fields["partitions"]),
            sockets=tuple(fields["sockets"]),
            restarts=fields["restarts"],
            parked=tuple(fields["parked"]),
            gateway_sockets=tuple(fields["gateway_sockets"]),
            syphon_socket=fields["syphon_socket"],
            journal_socket=fields["journal_socket"],
            directory=fields["directory"],
        )


def read_instructions() -> Instructions:
    """Read the supervisor's line from standard input.

    From then on this process works in the data directory, and dies with the supervisor.

    Exits quietly if the supervisor ends before it has written the line.
    """
    die_with_parent()
    # Its usual effect is an end. Those that read files at it take it when they serve.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    line = sys.stdin.readline()
    if not line:
        sys.exit(1)
    instructions = Instructions.from_json(line)
    if os.getppid() != instructions.supervisor:  # it died before that
        sys.exit(1)
    os.chdir(instructions.directory)
    return instructions


# The number of new objects after which Python looks for cycles among them. One turn makes some ten thousand objects,
# entries and deliveries, that live until their answers come and then go without the collector.
NEW_OBJECTS = 50_000


def collect_rarely() -> None:
    """Let Python's collector of cycles look at few objects: not at those that exist now, and rarely at new ones.

    Call this when all modules are loaded, because they live as long as the process. Until then it may be off.
    """
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS)
    gc.enable()


def announce_ready(**fields: Any) -> None:
    """Tell the supervisor that this process serves; `fields` are what only this process knows, such as its port."""
    _answer({"ready": True, **fields})


def fail(message: str, code: int = PERMANENT_FAULT) -> NoReturn:
    """Tell the supervisor that this process can never serve unless a setting changes, and exit.

    `message` is shown to the user: it names the setting and the fix. With NO_ROOM another start is made.
    """
    _answer({"ready": False, "message": message})
    sys.exit(code)


def _answer(document: dict[str, Any]) -> None:
    print(json.dumps(document), flush=True)
    # Nobody reads the pipe after this line, so later prints go to the logs.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
