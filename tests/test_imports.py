"""The import rules, held by reading every import in the sources. `tests.rooms` makes docs/design/rooms.md of them."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from bench.structure import C_FUNCTION
from tests.sources import ROOT, SHIPPED, imports, is_within, modules

OURS = ("protocol", "storage", "broker", "pipeline", "pyspark_peeklock", "bench", "tests")

# What waits, or looks at the world: no business of a pure module.
OUTSIDE = {
    "asyncio", "concurrent", "ctypes", "http", "io", "logging", "mmap", "multiprocessing", "os", "pathlib", "queue",
    "random", "select", "selectors", "shutil", "signal", "socket", "socketserver", "ssl", "subprocess", "sys",
    "tempfile", "threading", "time", "urllib.request",
    "aiohttp", "lmdb", "prometheus_client", "structlog", "uvloop",
}  # fmt: skip

# Folder or module: what of ours it may import. The longest name that fits a module counts.
MAY_IMPORT = {
    "protocol": {"protocol"},
    "storage": {"storage", "protocol.extension"},
    "broker": {"broker", "storage"},
    "broker.atom": {"broker.atom", "broker.errors", "broker.namespace", "protocol.symbols"},
    "broker.administration": {
        "broker.administration",
        "broker.atom",
        "broker.errors",
        "protocol.client.connection_string",
        "protocol.nodes.sas_tokens",
    },
    "broker.capture": {
        "broker.capture",
        "broker.administration.address",
        "broker.logging",
        "protocol.client.connection_string",
        "protocol.client.sockets",
        "protocol.nodes.sas_tokens",
        "storage.capture",
    },
    "broker.catalog": {"broker", "storage", "protocol.error_texts"},
    "broker.cluster": {"broker", "protocol.client.sockets"},
    "broker.pairing": {"broker.pairing", "broker.administration", "broker.atom", "broker.logging", "protocol"},
    "broker.pairing.sidecar": {
        "broker.administration.client",
        "broker.pairing",
        "broker.listening",
        "broker.logging",
        "broker.repeated_warning",
        "broker.tls",
        "protocol",
    },
    "broker.partition": {
        "broker.partition",
        "broker.errors",
        "broker.namespace.entities",
        "broker.namespace.fragments",
        "broker.namespace.tiers",
        "broker.requests",
        "broker.runs",
        "broker.wire",
        "broker.rules",
        "protocol.bounds",
        "protocol.codec",
        "protocol.error_texts",
        "protocol.errors",
        "protocol.extension",
        "protocol.lock_tokens",
        "protocol.symbols",
        "protocol.message.rendering",
        "protocol.message.fields",
        "protocol.message.intake",
        "storage",
    },
    "broker.rules": {
        "broker.rules",
        "broker.namespace.durations",
        "protocol.codec",
        "protocol.decimals",
        "protocol.errors",
        "protocol.message.layout",
        "protocol.symbols",
    },
    "broker.gateway": {
        "broker",
        "protocol",
        "storage.heap",
        "storage.queue_ids",
        "storage.records",
    },
    "broker.journal": {
        "broker",
        "protocol.codec",
        "protocol.message",
        "protocol.symbols",
        "storage.data_dir",
        "storage.durable",
        "storage.journal",
        "storage.liveness",
        "storage.log.frames",
        "storage.log.recovery",
        "storage.log.follower",
        "storage.log.tail",
        "storage.records",
        "storage.store",
    },
    "broker.http": {"broker"},
    "broker.cli": {"broker", "protocol", "storage"},
    # What all processes share must not drag in a part of one of them.
    "broker.errors": set(),
    "broker.wire": set(),
    "broker.named_records": set(),
    "broker.forms": {"broker.wire", "storage.records"},
    "broker.requests": {"broker.errors", "broker.forms", "broker.named_records", "storage.records"},
    "broker.large_frames": {"broker.wire"},
    "broker.runs": {
        "broker.wire",
        "protocol.extension",
        "protocol.lock_tokens",
        "protocol.message.intake",
        "storage.records",
    },
    "broker.namespace.names": set(),
    "broker.namespace.entities": {"broker.namespace.names", "protocol.bounds"},
    "broker.namespace.tiers": {"broker.namespace.entities"},
    "broker.namespace.fragments": {
        "broker.errors",
        "broker.wire",
        "protocol.error_texts",
        "protocol.message.fields",
        "storage.records",
    },
    "broker.namespace.rule_descriptions": {
        "broker.namespace.entities",
        "broker.namespace.durations",
        "broker.namespace.names",
        "protocol.codec",
        "protocol.decimals",
        "protocol.errors",
        "protocol.symbols",
    },
    "broker.metrics": set(),
    "broker.listening": set(),
    "broker.supervisor": {"broker", "protocol.extension", "storage"},
    "broker.settings": {"broker", "storage", "protocol.symbols"},
    "broker.settings.config": {
        "protocol.client.connection_string",
        "broker.namespace.entities",
        "broker.namespace.rule_descriptions",
        "broker.namespace.tiers",
        "broker.settings.behaviour",
        "broker.settings.cluster",
        "broker.settings.declared",
        "broker.settings.fields",
        "broker.settings.hosts",
        "broker.settings.listeners",
        "broker.settings.log",
        "broker.settings.placement",
        "broker.settings.security",
        "broker.settings.stores",
        "broker.settings.syphon",
    },
    "broker.settings.behaviour": {"broker.namespace.entities"},
    "broker.settings.cluster": {
        "broker.namespace.entities",
        "broker.settings.addresses",
        "broker.settings.fields",
    },
    "broker.settings.declared": {
        "broker.namespace.entities",
        "broker.namespace.rule_descriptions",
        "broker.settings.fields",
    },
    "broker.settings.fields": set(),
    "broker.settings.hosts": set(),
    "broker.settings.listeners": {"broker.namespace.entities", "broker.settings.fields"},
    "broker.settings.log": {"broker.namespace.entities"},
    "broker.settings.security": {"broker.namespace.entities", "broker.settings.fields", "protocol.host_names"},
    "broker.settings.stores": {"broker.namespace.entities", "broker.settings.fields"},
    "broker.settings.syphon": {
        "broker.administration.address",
        "broker.namespace.entities",
        "protocol.client.connection_string",
    },
    "pipeline": {"protocol", "pipeline"},
    # Reports, on whatever machine runs Spark: they read captures, and no broker's stores.
    "pipeline.jobs": {"pipeline.jobs", "pyspark_peeklock", "storage.capture", "storage.wording"},
    "pipeline.jobs.auditing.bodies": {"pipeline.jobs", "storage.records"},
    "pipeline.jobs.running": {"pipeline.jobs", "pyspark_peeklock", "protocol.client.errors"},
    # Those that change data are clients of a broker, as commands are.
    "pipeline.jobs.changing.completing": {"broker.cli.progress", "broker.cli.taking", "protocol", "pyspark_peeklock"},
    "pipeline.jobs.changing.destination": {"broker.administration", "broker.atom", "pipeline.jobs", "pyspark_peeklock"},
    "pipeline.jobs.drain": {
        "broker.administration",
        "broker.logging",
        "broker.pairing",
        "broker.settings.log",
        "pipeline.jobs",
        "protocol.client",
        "protocol.conditions",
        "pyspark_peeklock",
        "storage.wording",
    },
    "pipeline.jobs.changing.draining": {
        "broker.logging",
        "broker.pairing",
        "broker.settings.log",
        "protocol.client",
        "protocol.conditions",
        "pyspark_peeklock",
        "storage.wording",
    },
    "pipeline.jobs.auditing.presence": {"pipeline.jobs", "protocol.client", "pyspark_peeklock"},
    "pipeline.jobs.changing.repairing": {"broker.cli.messages", "protocol", "pyspark_peeklock"},
    "pipeline.jobs.resubmit": {"pipeline.jobs", "protocol.errors", "pyspark_peeklock"},
    # What a client of a broker needs, on machines that have none: no broker, no storage.
    "pyspark_peeklock": {
        "pyspark_peeklock",
        "protocol.bounds",
        "protocol.client",
        "protocol.codec",
        "protocol.conditions",
        "protocol.errors",
        "protocol.extension",
        "protocol.message",
        "protocol.nodes.sas_tokens",
        "protocol.symbols",
    },
    # Only where a query names a capture.
    "pyspark_peeklock.captures": {"pyspark_peeklock", "storage.capture", "storage.journal.entities"},
    # Spark imports these in every session, and the first two also where pyspark or pyarrow is missing.
    "pyspark_peeklock.readiness": set(),
    "pyspark_peeklock.options": {"pyspark_peeklock.errors", "protocol.client.connection_string"},
    "pyspark_peeklock.source": {"pyspark_peeklock"},
}

# Modules within a folder that may import broker, but not these of it.
MAY_NOT_IMPORT = {
    "broker.gateway": {
        "broker.partition",
        "broker.worker",
        "broker.one_process",
        "broker.observer",
        "broker.supervisor",
        "broker.cli",
    },
    "broker.http": {
        "broker.partition",
        "broker.worker",
        "broker.supervisor",
        "broker.gateway",
        "broker.cli",
    },
    "broker.worker": {
        "broker.gateway",
        "broker.one_process",
        "broker.http",
        "broker.supervisor",
        "broker.cli",
        "broker.exposition",
    },
    "broker.one_process": {"broker.partition", "broker.supervisor", "broker.cli"},
    "broker.observer": {
        "broker.partition",
        "broker.worker",
        "broker.one_process",
        "broker.supervisor",
        "broker.cli",
        "broker.gateway.gateway",
        "broker.gateway.connection",
    },
    "broker.inner_syphon": {
        "broker.partition",
        "broker.worker",
        "broker.one_process",
        "broker.observer",
        "broker.supervisor",
        "broker.cli",
        "broker.gateway.gateway",
        "broker.gateway.connection",
    },
    "broker.journal": {
        "broker.partition",
        "broker.worker",
        "broker.one_process",
        "broker.observer",
        "broker.inner_syphon",
        "broker.supervisor",
        "broker.cli",
        "broker.gateway.gateway",
        "broker.gateway.connection",
    },
    "broker.supervisor": {
        "broker.gateway",
        "broker.one_process",
        "broker.observer",
        "broker.inner_syphon",
        "broker.journal",
        "broker.http",
        "broker.worker",
        "broker.partition",
        "broker.cli",
    },
    "broker.catalog": {
        "broker.gateway",
        "broker.http",
        "broker.worker",
        "broker.partition",
        "broker.cli",
    },
}

PURE = (
    "protocol",
    "broker.pairing.aliases",
    "broker.pairing.backlog",
    "broker.pairing.costs",
    "broker.pairing.failures",
    "broker.pairing.health",
    "broker.pairing.options",
    "broker.pairing.splicing",
    "broker.pairing.sidecar.frames",
    "broker.pairing.sidecar.split_session",
    "broker.pairing.sidecar.through",
    "broker.pairing.sidecar.trust",
    "broker.partition",
    "broker.rules",
    "broker.wire",
    "broker.forms",
    "broker.named_records",
    "broker.requests",
    "broker.large_frames",
    "broker.runs",
    "broker.errors",
    "broker.namespace.entities",
    "storage.capture.inventory",
    "storage.journal.events",
    "storage.journal.frames",
    "storage.journal.rows",
    "storage.queue_ids",
    "storage.records",
    "storage.wording",
)
NOT_PURE = {
    "protocol.engine.proton.library": {"threading", "ctypes"},  # a buffer of each thread; what cffi does not know
    "protocol.engine.proton.native": {"os"},  # random bytes
    "protocol.extension": {"os"},  # a variable switches it off
    "protocol.native.build": {"contextlib", "pathlib", "sysconfig"},  # a part of the build
    "protocol.client.connection": {"asyncio", "ssl", "socket"},
    "protocol.client.sockets": {"socket"},
    "protocol.client.link_end": {"asyncio"},
    "protocol.client.links": {"asyncio"},
    "protocol.client.requests": {"asyncio", "time"},
    "protocol.client.transactions": {"asyncio"},
}

# Libraries that one place alone knows, or a few.
ONLY_IN = {
    "lmdb": {"storage.lmdb_store"},
    "cproton_ffi": {"protocol.engine.proton.library"},
    "protocol.engine.proton.library": {
        "protocol.engine.proton",
        "protocol.engine.engine",
        "protocol.engine.links",
        "protocol.engine.deliveries",
    },
    "structlog": {"broker.logging"},
    "uvloop": {
        "broker.gateway",
        "broker.observer",
        "broker.one_process",
        "broker.inner_syphon",
        "broker.journal",
        "broker.cli.pairing",
    },
    "aiohttp": {
        "broker.http",
        "broker.gateway.web",
        "broker.administration.client",
        "broker.cli.watching.traffic",
        "broker.journal.serving",
    },
    "websockets": {"broker.gateway.web"},
    "lark": {"broker.rules.syntax"},
    "prometheus_client": {
        "broker.exposition",
        "broker.journal_exposition",
        "broker.syphon_exposition",
        "broker.capture_exposition",
        "broker.sidecar_exposition",
        "broker.cli.watching.traffic",
    },
    "pyarrow": {
        "storage.capture",
        "storage.journal",
        "broker.capture",
        "broker.restoring",
        "pyspark_peeklock",
        "pipeline",
    },
    "typer": {"broker.cli"},
    "rich": {"broker.cli"},
    "pyspark": {"pyspark_peeklock", "pipeline"},
}

NOWHERE = {"proton", "cproton"}  # Proton's own Python classes: too slow for the wire, and a second way to do it


PATHS = dict(modules(*SHIPPED))


@cache
def sources() -> dict[str, set[str]]:
    """What each module imports. To read all of them takes seconds, so it is not done when tests are collected."""
    return {
        module: imports(ast.parse(path.read_text()), module, path.name == "__init__.py")
        for module, path in PATHS.items()
    }


def rule_for(module, rules):
    fitting = [name for name in rules if is_within(module, name)]
    return rules[max(fitting, key=len)] if fitting else None


def violations(module: str, imported: set[str]) -> list[str]:
    """The imports of `module` that break a rule."""
    allowed = rule_for(module, MAY_IMPORT)
    refused = rule_for(module, MAY_NOT_IMPORT) or set()
    is_pure = any(is_within(module, name) for name in PURE)
    excused = NOT_PURE.get(module, set())
    broken = []
    for name in sorted(imported):
        # `from broker import wire` is an import of broker.wire; of a bare package, only __version__ is worth having.
        ours = any(is_within(name, package) for package in OURS) and name != "broker.__version__"
        if ours and not any(is_within(name, each) for each in allowed or ()):
            broken.append(f"{name}: not among what it may import")
        if any(is_within(name, each) for each in refused):
            broken.append(f"{name}: belongs to another process")
        if is_pure and any(is_within(name, each) for each in OUTSIDE - excused):
            broken.append(f"{name}: a pure module does not look at the world")
        for library, places in ONLY_IN.items():
            if is_within(name, library) and not any(is_within(module, place) for place in places):
                broken.append(f"{name}: only {' and '.join(sorted(places))} know it")
        if any(is_within(name, each) for each in NOWHERE):
            broken.append(f"{name}: not used here")
    return broken


@pytest.mark.parametrize("module", PATHS)
def test_a_module_imports_only_what_it_may(module):
    assert violations(module, sources()[module]) == []


def circles(sources: dict[str, set[str]]) -> list[set[str]]:
    """Modules that import each other, directly or by way of others."""
    imported = {
        module: {each for name in names if (each := name if name in sources else name.rpartition(".")[0]) in sources}
        for module, names in sources.items()
    }
    reached = {module: set(names) for module, names in imported.items()}
    grown = True
    while grown:
        grown = False
        for names in reached.values():
            further = set().union(*(reached[name] for name in names)) - names
            names |= further
            grown = grown or bool(further)
    found = [
        {other for other in names if module in reached[other]} for module, names in reached.items() if module in names
    ]
    return [circle for place, circle in enumerate(found) if circle not in found[:place]]


def test_imports_go_one_way():
    assert circles(sources()) == []


C_CALL = re.compile(r"(\w+)\(|, (\w+), METH_")  # the latter in tables of methods


def calls_of_c(texts: dict[str, str]) -> dict[str, set[str]]:
    """For each file of C, those whose functions it calls, or offers to Python."""
    texts = {name: re.sub(r"//.*", "", text) for name, text in texts.items()}
    owners = {
        found[1]: name
        for name, text in texts.items()
        for found in C_FUNCTION.finditer(text)
        if not found[0].startswith("static ")
    }
    called = {name: {call or offered for call, offered in C_CALL.findall(text)} for name, text in texts.items()}
    return {name: {owners[each] for each in words if each in owners} - {name} for name, words in called.items()}


def test_files_of_c_call_one_way():
    texts = {path.stem: path.read_text() for path in (ROOT / "protocol" / "native").glob("*.c")}
    found = calls_of_c(texts)
    assert {"outgoing", "frames"} <= found["pump"]
    assert circles(found) == []


def test_a_circle_of_c_is_found():
    sent = "static int one(void) { return 1; }\n\nint send(void) {\n    return take() + one();\n}\n"
    took = "int one;\n\nint take(void) { return send(); }\n"
    assert circles(calls_of_c({"sent": sent, "took": took})) == [{"sent", "took"}]
    assert circles(calls_of_c({"sent": sent, "took": took.replace("send()", "1; // send")})) == []


def rooms(sources: dict[str, set[str]], folder: str) -> dict[str, set[str]]:
    """What stands directly in a folder, modules and folders, each with what it imports of its neighbours."""
    depth = folder.count(".") + 1 if folder else 0
    inside = (
        {module for module in sources if is_within(module, folder) and module != folder} if folder else set(sources)
    )
    found: dict[str, set[str]] = {}
    for module in inside:
        room = ".".join(module.split(".")[: depth + 1])
        imported = {name if name in sources else name.rpartition(".")[0] for name in sources[module]}
        found.setdefault(room, set()).update(".".join(name.split(".")[: depth + 1]) for name in imported & inside)
    return {room: imported - {room} for room, imported in found.items()}


FOLDERS = sorted({module.rpartition(".")[0] for module in PATHS})


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_import_one_way(folder):
    assert circles(rooms(sources(), folder)) == []


def test_a_circle_of_folders_is_found():
    sources = {
        "broker.gateway.links.senders": {"broker.gateway.nodes.cbs"},
        "broker.gateway.nodes.management": {"broker.gateway.links.delivery.deliver"},
        "broker.gateway.nodes.cbs": {"broker.errors"},
        "broker.gateway.links.delivery": set(),
        "broker.errors": set(),
    }
    assert circles(sources) == circles(rooms(sources, "broker")) == []
    assert circles(rooms(sources, "broker.gateway")) == [{"broker.gateway.links", "broker.gateway.nodes"}]


def test_a_circle_is_found():
    sources = {
        "broker.a": {"broker.b.B"},
        "broker.b": {"broker.c"},
        "broker.c": {"broker.a.A"},
        "broker.d": {"broker.a.A"},
    }
    assert circles(sources) == [{"broker.a", "broker.b", "broker.c"}]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("protocol.message.sections", "import broker.wire"),
        ("protocol.message.sections", "from storage import records"),
        ("protocol.message.sections", "import time"),
        ("protocol.message.sections", "def f():\n    from cproton_ffi import lib"),
        ("protocol.engine.engine", "from proton import Message"),
        ("protocol.client.connection", "from protocol.engine.proton.library import lib"),
        ("storage.verification", "import lmdb"),
        ("storage.store", "from broker.errors import LockLost"),
        ("broker.partition.state.queue", "import asyncio"),
        ("broker.partition.state.queue", "from broker.settings.config import Settings"),
        ("broker.partition.state.queue", "from ...gateway import senders"),
        ("broker.gateway.links.senders", "from storage.lmdb_store import LmdbStore"),
        ("broker.gateway.links.senders", "from broker import worker"),
        ("broker.supervisor", "import broker.gateway.links.senders"),
        ("broker.worker", "from protocol import codec"),
        ("broker.metrics", "from prometheus_client import Counter"),
        ("broker.cli", "import tests.brokers"),
        ("pyspark_peeklock.sink", "from broker.wire import Extra"),
        ("pyspark_peeklock.sink", "import storage.records"),
        ("broker.cli", "from pyspark.sql import SparkSession"),
    ],
)
def test_the_rules_catch(module, source):
    assert violations(module, imports(ast.parse(source), module, is_package=False))


def test_every_rule_is_about_something_that_exists():
    named = {*MAY_IMPORT, *MAY_NOT_IMPORT, *PURE}.union(*ONLY_IN.values()) - {"pipeline"}
    assert [name for name in sorted(named) if not any(is_within(module, name) for module in sources())] == []


def bare_imports(path: Path, source: str) -> list[str]:
    """What a module imports of its own folder by name alone."""
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    neighbours = {each.stem for each in path.parent.glob("*.py")}
    found = imports(ast.parse(source), module, is_package=False)
    return sorted(name for name in found if name.partition(".")[0] in neighbours)


def test_tests_import_their_neighbours_by_full_names():
    """By its bare name a helper would be a second module, of classes that are not the same, and unknown to mypy."""
    programs = ROOT / "tests" / "interop"  # its folders have programs that run in environments of their own
    paths = [path for path in (ROOT / "tests").rglob("*.py") if programs not in path.parent.parents]
    found = {str(path): bare_imports(path, path.read_text()) for path in paths}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from driver import Driver", ["driver.Driver"]),
        ("def f():\n    import driver as d, json", ["driver"]),
        ("from tests.partition.driver import Driver\nfrom tests.partition import turns", []),
    ],
)
def test_a_bare_import_is_found(source, found):
    assert bare_imports(ROOT / "tests" / "partition" / "test_turns.py", source) == found
