"""The scenarios with the SDKs' administration clients, over HTTPS, and over WebSockets. Programs make the entities."""

from tests.interop.scenario import Scenario

TLS_PORT = 443
"""That of HTTPS and WebSockets: not every SDK takes another."""


def _scenario(id_: str, sentence: str) -> Scenario:
    return Scenario(id_, sentence, (), queue=None)


SCENARIOS = (
    _scenario(
        "admin-queue",
        "A queue is created with settings of its own, got with just these, listed, updated, and gone once deleted; its "
        "counts tell active, scheduled and dead-lettered messages.",
    ),
    _scenario(
        "admin-topic",
        "A topic is created with settings of its own, got with just these, listed, updated, and gone once deleted; its "
        "counts tell subscriptions and scheduled messages.",
    ),
    _scenario(
        "admin-subscription",
        "A subscription is created with settings of its own, got with just these, listed, updated, and gone once "
        "deleted; its counts tell active and dead-lettered messages.",
    ),
    _scenario(
        "admin-rule",
        "Rules with a SQL filter, parameters and an action and with a correlation filter are created, got, listed, "
        "updated and deleted, and decide from then on what arrives.",
    ),
    _scenario(
        "admin-authorization",
        "A queue is created with an authorization rule whose key may send to it, and not receive from it.",
    ),
    _scenario("admin-forwarding", "A queue is created that forwards to another; what is sent to it arrives there."),
    _scenario(
        "admin-names",
        "A queue and a topic that are created in mixed case are listed in lower case and found in any case; the source "
        "of a dead letter is in lower case, too. A subscription keeps its case.",
    ),
    _scenario("admin-pages", "A list of 120 subscriptions has each of them once."),
    _scenario("admin-namespace", "The namespace tells its name and its tier."),
    _scenario(
        "admin-errors",
        "What exists already, does not exist, is out of range, or is asked for with a key without Manage is the SDK's "
        "error for that.",
    ),
    _scenario(
        "websockets",
        "A message of 300 KiB and a batch are sent, received and completed over WebSockets with TLS.",
    ),
)

_ADMINISTRATION = [scenario.id for scenario in SCENARIOS if scenario.id.startswith("admin-")]
_NO_ADMINISTRATION = dict.fromkeys(_ADMINISTRATION, "the library has no administration client")
_NO_WEBSOCKETS = "the program uses plain TCP; the SDKs show WebSockets"

NOT_APPLICABLE: dict[str, dict[str, str]] = {
    "jms": {**_NO_ADMINISTRATION, "websockets": _NO_WEBSOCKETS},
    "rhea": {**_NO_ADMINISTRATION, "websockets": _NO_WEBSOCKETS},
    "amqpnetlite": {**_NO_ADMINISTRATION, "websockets": _NO_WEBSOCKETS},
    "proton": {**_NO_ADMINISTRATION, "websockets": "the library has no WebSockets"},
}

_ADMINISTRATION_NOTES = dict.fromkeys(_ADMINISTRATION, "the SDK's client trusts only what REQUESTS_CA_BUNDLE names")

NOTES: dict[str, dict[str, str]] = {
    "python-7.14.3": _ADMINISTRATION_NOTES,
    "dotnet": {"admin-errors": "without a lock that is too long, which the SDK itself refuses"},
    "java": {
        "admin-subscription": "the SDK leaves the time to live out of an update, which so sets it to its default",
        "admin-rule": "with texts only, because the SDK sends all values as text",
    },
}
