"""Which tests a change can reach: by what they import, by the programs that they run, by the files that they name.

A test reaches the modules that it imports, directly or by way of others, and each `conftest.py` above it. What it runs
as a program is told apart, because a change of any part of a broker reaches all tests that start one. A module is run
by who names it in a string; and commands import what they need when they are run, which is no other thing.

A file that is no module belongs to the modules beside it that name it. Sources in C belong to the module that loads
the extension. Other files, such as documents, are read by the tests and helpers that name them or their folder.
"""

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath

from tests.sources import ROOT, SHIPPED, imports_of, is_within, modules

EXTENSION = "protocol.extension"
NATIVE = PurePosixPath("protocol/native")
COMMANDS = "broker.cli"
PACKAGES = (*SHIPPED, "bench", "tests")
# What all tests depend on, whoever names it.
OF_ALL = {PurePosixPath(name) for name in ("pyproject.toml", "Makefile", ".ci/run", "tests/conftest.py")}
# What no test depends on.
OF_NONE = {PurePosixPath(name) for name in (".gitignore", ".dockerignore", "LICENSE", ".github/workflows/ci.yml")}


class Unknown(Exception):
    """Nobody can say which tests a change reaches. The text says of which file."""


@dataclass(frozen=True)
class Reach:
    """Paths of test files: those that a change reaches in their own process, and others whose programs it reaches."""

    tests: Set[str]
    of_programs: Set[str]


@dataclass(frozen=True)
class Module:
    """`later` is what a command imports when it is run; `says` are all strings, some of which name programs."""

    path: PurePosixPath
    imports: Set[str]
    later: Set[str]
    says: Set[str]

    @property
    def is_test(self) -> bool:
        return self.path.parts[0] == "tests" and self.path.name.startswith("test_")


def read() -> dict[str, Module]:
    """All modules of this checkout, by their names."""
    return {
        name: parsed(name, PurePosixPath(path.relative_to(ROOT)), path.read_text()) for name, path in modules(*PACKAGES)
    }


def parsed(name: str, path: PurePosixPath, source: str) -> Module:
    tree = ast.parse(source)
    is_package = path.name == "__init__.py"
    nodes = list(ast.walk(tree))
    says = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    everything = imports_of(nodes, name, is_package)
    at_once = imports_of(outside_of_functions(tree), name, is_package) if is_within(name, COMMANDS) else everything
    return Module(path, at_once, everything - at_once, says)


def outside_of_functions(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from outside_of_functions(node)


class Sources:
    def __init__(self, known: Mapping[str, Module]) -> None:
        self._known = known
        self._names = {module.path: name for name, module in known.items()}
        self._direct: dict[str, Set[str]] = {}  # see `_imports_of`
        self._imported: dict[str, Set[str]] = {}  # see `_closed`
        self._run: dict[str, Set[str]] = {}  # see `_programs`

    def reached_by(self, changed: Iterable[str]) -> Reach:
        """`changed` are paths in the repository. Raises Unknown."""
        tests, of_programs = set[str](), set[str]()
        for path in map(PurePosixPath, changed):
            if path in OF_ALL:
                raise Unknown(f"all tests depend on {path}")
            if path not in OF_NONE:
                found = self._reached(path)
                tests |= found.tests
                of_programs |= found.of_programs
        return Reach(tests, of_programs - tests)

    def nearest_first(self, tests: Iterable[str], changed: str) -> list[str]:
        """Those first that import what was changed; then those by way of one module, of two, and so on."""
        level = self._modules_of(PurePosixPath(changed))
        steps = dict.fromkeys(level, 0)
        while level:
            level = {name for name in self._known if name not in steps and not level.isdisjoint(self._imports_of(name))}
            steps |= dict.fromkeys(level, max(steps.values()) + 1)

        def distance(path: str) -> tuple[int, int, str]:
            name = self._names[PurePosixPath(path)]
            return steps.get(name, len(self._known)), len(self._tests[name]), path

        return sorted(tests, key=distance)

    def _reached(self, path: PurePosixPath) -> Reach:
        changed = self._modules_of(path)
        tests = {self._path(test) for test, above in self._tests.items() if not changed.isdisjoint(above)}
        of_programs = {
            self._path(test)
            for test, above in self._tests.items()
            if any(not changed.isdisjoint(self._programs(each)) for each in above)
        }
        if tests or of_programs:
            return Reach(tests, of_programs)
        readers = {self._path(test) for test, above in self._tests.items() if self._names_it(above, path)}
        if not readers:
            raise Unknown(f"no test imports, runs or names {path}")
        return Reach(readers, set())

    def _modules_of(self, path: PurePosixPath) -> Set[str]:
        if path.is_relative_to(NATIVE):
            return {EXTENSION}
        if path in self._names:
            return {self._names[path]}
        if path.suffix == ".py" and path.parts[0] in PACKAGES:
            raise Unknown(f"{path} is gone, and with it what those had who imported it")
        return {
            name
            for name, module in self._known.items()
            if module.path.parent == path.parent and any(path.name in each for each in module.says)
        }

    def _names_it(self, names: Iterable[str], path: PurePosixPath) -> bool:
        folders = {part for part in path.parent.parts if part not in PACKAGES}
        return any(
            path.name in said or said in folders
            for name in names
            if self._known[name].path.parts[0] in ("tests", "bench")
            for said in self._known[name].says
        )

    def _path(self, name: str) -> str:
        return str(self._known[name].path)

    @cached_property
    def _tests(self) -> dict[str, Set[str]]:
        """Test files, each with all modules that it imports, itself among them."""
        found: dict[str, Set[str]] = {}
        for name, module in self._known.items():
            if module.is_test:
                conftests = {".".join((*parent.parts, "conftest")) for parent in module.path.parents}
                found[name] = set[str]().union(*map(self._closed, {name, *conftests & self._known.keys()}))
        return found

    def _module(self, name: str) -> str | None:
        """Of `a.b.c`, which may be a name in a module, the module."""
        while name and name not in self._known:
            name = name.rpartition(".")[0]
        return name or None

    def _closed(self, name: str) -> Set[str]:
        """A module, and all that it imports, directly or by way of others."""
        if name not in self._imported:
            self._imported[name] = behind(name, self._imports_of)
        return self._imported[name]

    def _programs(self, name: str) -> Set[str]:
        """All modules of the programs that this module runs, and of those that they run."""
        if name not in self._run:
            self._run[name] = set[str]().union(*map(self._whole_program, self._started(name)))
        return self._run[name]

    def _whole_program(self, name: str) -> Set[str]:
        return behind(name, lambda each: self._imports_of(each) | self._started(each))

    def _started(self, name: str) -> Set[str]:
        module = self._known[name]
        programs = {said for said in module.says if "." in said and said in self._known}
        mains = {main for each in programs if (main := f"{each}.__main__") in self._known}
        return programs | mains | self._found(module.later)

    def _imports_of(self, name: str) -> Set[str]:
        if name not in self._direct:
            self._direct[name] = self._found(self._known[name].imports)
        return self._direct[name]

    def _found(self, imported: Iterable[str]) -> Set[str]:
        """Of names, each a module or in one, the modules that are ours."""
        return {module for name in imported if (module := self._module(name)) is not None}


def behind(name: str, following: Callable[[str], Set[str]]) -> Set[str]:
    """A name, those that follow it, those that follow them ..."""
    found, waiting = {name}, [name]
    while waiting:
        new = following(waiting.pop()) - found
        found |= new
        waiting += new
    return found
