"""Writes README.md from the last run: `python -m tests.interop.readme`."""

import json
import re
import sys
from pathlib import Path

from tests.interop.harness import results_file
from tests.interop.partitioned_scenarios import NOT_PARTITIONED_WITH, ONLY_PARTITIONED, PLAIN
from tests.interop.scenario import Scenario
from tests.interop.scenarios import NOT_APPLICABLE, NOTES, SCENARIOS, SDKS, applicable

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"
PASSES, FAILS, NONE = "yes", "**no**", "-"
FORMS = (False, True)  # are the entities partitioned?
Results = dict[bool, dict[str, dict[str, bool]]]  # by form, library and scenario

_INTRODUCTION = """\
# Scenarios with real client libraries

Each library, unmodified, runs the same scenarios against two real brokers. One has plain entities and one gateway. The
other has partitioned entities on four partitions and two workers, and two gateways that share the connections. Both
have HTTPS on port 443 of a loopback address, by a certificate of `peeklock ca`, which the programs are told to trust. A
program asserts what it observes; *yes* means that all of the sentence held on both brokers, - marks what a library
cannot do, a number a footnote. The column *partitioned* says which scenarios run on plain entities on both brokers, and
which on the second broker only.

    python tests/interop/sdks.py                     # install the libraries, pinned, and build the programs
    python -m pytest tests/interop                   # run them: a test for each scenario with each library
    python -m tests.interop.readme                   # write this page from that run

With PEEKLOCK_REQUIRE_INTEROP=1 the tests install by themselves, and fail where they would skip.

`scenarios.py` is the table of scenarios, settings of their entities and exceptions, with those on topics in
`topic_scenarios.py`, on sessions in `session_scenarios.py`, of administration clients and over WebSockets in
`administration_scenarios.py`, on corners that the SDKs' own tests look into in `corner_scenarios.py`, and on what only
partitioned entities have in `partitioned_scenarios.py`; `python/`, `javascript/`, `go/`, `java/`, `dotnet/` and
`proton/` hold the programs. All run as `program SCENARIO...`, read connection strings as JSON from PEEKLOCK_INTEROP and
print a line of JSON for each scenario.

What frameworks of JMS do (Spring, Camel, Azure's library, and Qpid JMS with topics and temporary queues) is in
`test_jms_frameworks.py`, as checks of one program of its own; what Celery does is in `test_celery.py`.
"""


def _pinned(file: str, pattern: str) -> str:
    found = re.search(pattern, (HERE / file).read_text())
    if found is None:
        raise ValueError(f"{file} pins nothing like {pattern}")
    return found[1]


def titles() -> dict[str, str]:
    """The libraries as their users call them, with the versions that are pinned."""
    packages, modules, pom, project = "javascript/package.json", "go/go.mod", "java/pom.xml", "dotnet/interop.csproj"
    versions = {
        "JavaScript @azure/service-bus": _pinned(packages, r'service-bus": "([^"]+)"'),
        "Go azservicebus": _pinned(modules, r"azservicebus v(\S+)"),
        "Java azure-messaging-servicebus": _pinned(pom, r"azure-messaging-servicebus</artifactId>\s*<version>([^<]+)"),
        ".NET Azure.Messaging.ServiceBus": _pinned(project, r'Azure.Messaging.ServiceBus" Version="([^"]+)'),
        "Qpid JMS": _pinned(pom, r"qpid-jms-client</artifactId>\s*<version>([^<]+)"),
        "rhea": _pinned(packages, r'rhea": "([^"]+)"'),
        "AMQP.Net Lite": _pinned(project, r'AMQPNetLite" Version="([^"]+)'),
        "python-qpid-proton": _pinned("proton/requirements.txt", r"python-qpid-proton==(\S+)"),
    }
    pythons = [f"Python azure-servicebus {sdk.removeprefix('python-')}" for sdk in SDKS if sdk.startswith("python-")]
    others = [f"{name} {version}" for name, version in versions.items()]
    return dict(zip(SDKS, [*pythons, *others], strict=True))


class _Footnotes:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def number(self, text: str) -> str:
        if text not in self.texts:
            self.texts.append(text)
        return f"<sup>{self.texts.index(text) + 1}</sup>"


def _cell(sdk: str, scenario: Scenario, results: Results, footnotes: _Footnotes) -> str:
    if reason := NOT_APPLICABLE[sdk].get(scenario.id):
        return NONE + footnotes.number(reason)
    ran = [results[form][sdk][scenario.id] for form in FORMS if scenario in applicable(sdk, partitioned=form)]
    texts = (tables.get(sdk, {}).get(scenario.id) for tables in (NOTES, NOT_PARTITIONED_WITH))
    return (PASSES if all(ran) else FAILS) + "".join(footnotes.number(text) for text in texts if text)


def _partitioned(scenario: Scenario, footnotes: _Footnotes) -> str:
    if reason := PLAIN.get(scenario.id):
        return NONE + footnotes.number(reason)
    return "only" if scenario.id in ONLY_PARTITIONED else PASSES


def render(results: Results) -> str:
    """All results that are applicable must be there."""
    names = titles()
    footnotes = _Footnotes()
    rows = [["scenario", "what must hold", "shows", "partitioned", *(names[sdk] for sdk in SDKS)]]
    rows.append(["---"] * len(rows[0]))
    for scenario in SCENARIOS:
        cells = [_partitioned(scenario, footnotes), *(_cell(sdk, scenario, results, footnotes) for sdk in SDKS)]
        rows.append([scenario.id, scenario.sentence, ", ".join(scenario.seeds), *cells])
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    notes = "\n".join(f"{number}. {text}" for number, text in enumerate(footnotes.texts, 1))
    return f"{_INTRODUCTION}\n{table}\n\n{notes}\n"


def last_results() -> Results:
    """Results of the last run of each library. Raises SystemExit if one is missing or has not all scenarios."""
    results: Results = {form: {} for form in FORMS}
    for form in FORMS:
        for sdk in SDKS:
            file = results_file(sdk, partitioned=form)
            found = json.loads(file.read_text()) if file.is_file() else {}
            if missing := [each.id for each in applicable(sdk, partitioned=form) if each.id not in found]:
                sys.exit(f"no result of {sdk} for {', '.join(missing)}: run python -m pytest tests/interop first")
            results[form][sdk] = found
    return results


if __name__ == "__main__":
    README.write_text(render(last_results()))
