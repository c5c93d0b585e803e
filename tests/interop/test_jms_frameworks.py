"""JMS 2.0 by Qpid JMS, Spring, Camel and Azure's library: one run of one program, and a test for each of its checks.

Azure's library takes AMQP on port 5671 alone, so the broker has an address of its own.
"""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.caller import REQUIRE_INTEROP
from tests.interop import harness
from tests.interop.harness import Result, SecureBroker
from tests.interop.sdks import JMS_FRAMEWORKS
from tests.interop.test_interop import ensure

pytestmark = pytest.mark.interop

QUEUES = (
    "jms-hello",
    "jms-requests",
    "jms-delays",
    "spring-queue",
    "spring-requests",
    "spring-browsed",
    "spring-selected",
    "spring-delays",
    "camel-requests",
    "azure-requests",
    "azure-delays",
)
# And the subscriptions that are declared; all others are made by clients.
TOPICS: Mapping[str, tuple[str, ...]] = {
    "jms-durable": (),
    "jms-declared": ("declared",),
    "jms-shared-durable": (),
    "jms-shared": (),
    "jms-plain": (),
    "jms-rights": ("declared",),
    "jms-unsubscribe": (),
    "spring-topic": ("sub1",),
    "spring-new-topic": (),
    "spring-shared-topic": (),
    "spring-plain-topic": (),
    "camel-topic": (),
    "azure-topic": (),
}
CHECKS = (
    "qpid-hello-world",
    "qpid-durable-subscriber",
    "qpid-declared-subscription",
    "qpid-shared-durable",
    "qpid-shared",
    "qpid-subscriber",
    "qpid-subscriber-rights",
    "qpid-unsubscribe",
    "qpid-temporary-queue",
    "qpid-temporary-topic",
    "qpid-delivery-delay",
    "spring-listener-queue",
    "spring-listener-subscription",
    "spring-listener-new-subscription",
    "spring-listener-shared",
    "spring-listener-topic",
    "spring-browse",
    "spring-selector",
    "spring-send-and-receive",
    "spring-delivery-delay",
    "camel-in-out",
    "camel-topic",
    "azure-subscriptions",
    "azure-request-and-reply",
    "azure-delivery-delay",
)


def config() -> str:
    lines = [harness.rule(harness.LISTENER, "Listen")]
    lines += [f'[[queues]]\nname = "{name}"' for name in QUEUES]
    for topic, subscriptions in TOPICS.items():
        lines.append(f'[[topics]]\nname = "{topic}"')
        lines += [f'[[topics.subscriptions]]\nname = "{name}"' for name in subscriptions]
    return "\n".join(lines) + "\n"


class JmsBroker(SecureBroker):
    """It has AMQP with TLS on the port of the cloud, too."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, config())
        text = self.config_file.read_text()
        self.config_file.write_text(f'{text}[amqp]\nhost = "{self.https_host}"\ntls_port = 5671\n')
        self.amqp_host = self.https_host


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Mapping[str, Result], str]:
    ensure(JMS_FRAMEWORKS.toolchain)
    try:
        broker = JmsBroker(tmp_path_factory.mktemp("jms"))
    except harness.CannotListen as error:
        pytest.fail(str(error)) if REQUIRE_INTEROP else pytest.skip(str(error))
    with broker:
        return harness.run(JMS_FRAMEWORKS, broker, CHECKS, partitioned=False), broker.log()


@pytest.mark.parametrize("check", CHECKS)
def test_a_framework_of_jms(results: tuple[Mapping[str, Result], str], check: str) -> None:
    found, log = results
    assert found[check].ok, f"{found[check].detail}\n\nThe broker's log ends with\n{log[-4000:]}"
