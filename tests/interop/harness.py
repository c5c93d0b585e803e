"""Runs one SDK's program against a real broker that has an entity for every scenario."""

import json
import os
import random
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from broker.cli.authority import TRUST_STORE_PASSWORD, Authority
from protocol.nodes.sas_tokens import generate
from tests.brokers import KEY, KEY_NAME, Broker
from tests.caller import WORKERS
from tests.interop.administration_scenarios import TLS_PORT
from tests.interop.partitioned_scenarios import KEYED, PLAIN
from tests.interop.scenario import ENTITY_PREFIX
from tests.interop.scenarios import SCENARIOS
from tests.interop.sdks import CACHE, Program

RUN_TIMEOUT_S = 400  # several run side by side
RESULTS = CACHE / "results"
LISTENER = ("listen-only", "key of the listener")
SENDER = ("send-only", "key of the sender")
PARTITIONED = """\
partitions = 4
gateways = 2
partitioning = { default = true, max_entities = 1000 }
"""


@dataclass(frozen=True)
class Result:
    ok: bool
    detail: str
    seconds: float


def _toml(value: object) -> str:
    """Booleans, integers and strings are spelled in TOML as in JSON."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_toml(name)} = {_toml(item)}" for name, item in value.items()) + " }"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _entity(kind: str, name: str, settings: Mapping[str, object]) -> str:
    lines = (f"{setting} = {_toml(value)}\n" for setting, value in {"name": name, **settings}.items())
    return f"[[{kind}]]\n" + "".join(lines)


def rule(login: tuple[str, str], right: str) -> str:
    name, key = login
    return (
        "[[security.authorization_rules]]\n"
        f"key_name = {_toml(name)}\nprimary_key = {_toml(key)}\nrights = [{_toml(right)}]\n"
    )


class CannotListen(Exception):
    """The tests may not listen on TLS_PORT."""


class SecureBroker(Broker):
    """A broker that has HTTPS on TLS_PORT, at `https_host`, with a certificate by an authority of its own."""

    def __init__(self, directory: Path, config: str, workers: int | None = WORKERS) -> None:
        """Raises CannotListen."""
        self.https_host = free_host()
        self.amqp_host = "127.0.0.1"
        self.authority = Authority(directory / "authority")
        certificate, key = self.authority.issue("server", [self.https_host, "localhost"], is_server=True)
        secure = (
            f"[http]\nhost = {_toml(self.https_host)}\ntls_port = {TLS_PORT}\n"
            f"[tls]\ncertificate = {_toml(str(certificate))}\nkey = {_toml(str(key))}\n"
        )
        super().__init__(directory, config + secure, workers=workers)

    @property
    def secure_connection_string(self) -> str:
        return f"Endpoint=sb://{self.https_host}/;SharedAccessKeyName={KEY_NAME};SharedAccessKey={KEY}"


def free_host() -> str:
    """A loopback address of which the port is free: several brokers run side by side."""
    while True:
        host = ".".join(["127", *(str(random.SystemRandom().randrange(1, 255)) for _ in range(3))])
        with socket.socket() as trying:
            try:
                trying.bind((host, TLS_PORT))
            except PermissionError as error:
                text = f"port {TLS_PORT}: {error.strerror}; run as root, or lower net.ipv4.ip_unprivileged_port_start"
                raise CannotListen(text) from error
            except OSError:
                continue
            return host


def broker(directory: Path, *, partitioned: bool) -> SecureBroker:
    """A broker with keys that have one right each, and with the queue or the topic of every scenario that wants one.

    If these are to be partitioned, there are also two workers, and two gateways between which connections are shared.
    Raises CannotListen.
    """
    config = _broker_config()
    return SecureBroker(directory, PARTITIONED + config, 2) if partitioned else SecureBroker(directory, config)


def _broker_config() -> str:
    parts = [rule(LISTENER, "Listen"), rule(SENDER, "Send")]
    for scenario in SCENARIOS:
        if scenario.topic is not None:
            parts.append(_entity("topics", scenario.entity, scenario.topic))
        elif scenario.queue is not None:
            plain = {"enable_partitioning": False} if scenario.id in PLAIN else {}
            parts.append(_entity("queues", scenario.entity, {**scenario.queue, **plain}))
        parts += [_entity("queues", name, {}) for name in scenario.other_queues]
    return "\n".join(parts)


def signed_connection_string(broker: Broker) -> str:
    """With a signature in place of the key, for the bare host: as Go's SDK makes one."""
    host = f"localhost:{broker.amqp_port}"
    signature = generate(host, KEY_NAME, KEY, int(time.time()) + 3600)
    return f"Endpoint=sb://{host};SharedAccessSignature={signature};UseDevelopmentEmulator=true;"


def program_config(broker: SecureBroker, *, partitioned: bool) -> dict[str, object]:
    """What a program finds, as JSON, in PEEKLOCK_INTEROP: connection strings, and (key name, key) for the others.

    `keyed` are the scenarios whose messages the program is to give a partition key, one for each scenario.
    """
    return {
        "keyed": sorted(KEYED) if partitioned else [],
        "connection_string": broker.connection_string,
        "wrong_key": broker.connection_string_for(KEY_NAME, "wrong"),
        "listen_only": broker.connection_string_for(*LISTENER),
        "send_only": broker.connection_string_for(*SENDER),
        "signature": signed_connection_string(broker),
        "secure": broker.secure_connection_string,
        "secure_listen_only": broker.secure_connection_string.replace(KEY_NAME, LISTENER[0]).replace(KEY, LISTENER[1]),
        "authority": str(broker.authority.certificate_file),
        "host": broker.amqp_host,
        "port": broker.amqp_port,
        "key_name": KEY_NAME,
        "key": KEY,
        "listener": LISTENER,
        "sender": SENDER,
        "entity_prefix": ENTITY_PREFIX,
    }


def trust(broker: SecureBroker) -> dict[str, str]:
    """Variables with which programs of all languages trust the broker's authority."""
    authority = broker.authority
    store = f"-Djavax.net.ssl.trustStore={authority.trust_store}"
    return {
        "NODE_EXTRA_CA_CERTS": str(authority.certificate_file),
        "SSL_CERT_FILE": str(authority.certificate_file),
        "REQUESTS_CA_BUNDLE": str(authority.certificate_file),
        "JDK_JAVA_OPTIONS": f"{store} -Djavax.net.ssl.trustStorePassword={TRUST_STORE_PASSWORD}",
    }


def run(program: Program, broker: SecureBroker, scenarios: Iterable[str], *, partitioned: bool) -> dict[str, Result]:
    """Results by scenario. One that the program never reported is a failure with what it wrote on its terminal."""
    names = list(scenarios)
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [*program.command, *names],
            env={
                **os.environ,
                **trust(broker),
                "PEEKLOCK_INTEROP": json.dumps(program_config(broker, partitioned=partitioned)),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        try:
            output, _ = process.communicate(timeout=RUN_TIMEOUT_S)
            ending = f"the program ended with exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            ending = f"the program was still running after {RUN_TIMEOUT_S} s"
        errors.seek(0)
        terminal = errors.read().decode(errors="replace")[-4000:]
    results = {}
    for line in output.decode().splitlines():
        if line.startswith("{"):
            report = json.loads(line)
            results[report["scenario"]] = Result(report["ok"], report["detail"], report["seconds"])
    missing = Result(False, f"no result: {ending}\n{terminal}", 0.0)
    return {name: results.get(name, missing) for name in names}


def results_file(sdk: str, *, partitioned: bool) -> Path:
    return RESULTS / (f"{sdk}-partitioned.json" if partitioned else f"{sdk}.json")


def keep(sdk: str, results: dict[str, Result], *, partitioned: bool) -> Path:
    """Write results where `readme.py` reads them."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    file = results_file(sdk, partitioned=partitioned)
    file.write_text(json.dumps({name: result.ok for name, result in results.items()}, indent=1))
    return file
