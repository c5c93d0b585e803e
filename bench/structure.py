"""The shape of the sources in figures: python bench/structure.py [DIRECTORY].

Prints modules and lines by folder, the longest modules and functions, and circles of imports: between modules, and
between neighbours in a folder (where anything in one imports anything in the other). Of C it has no imports. Reads the
sources only, so it works on any version.
"""

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGES = ("broker", "protocol", "storage", "pipeline")
IMPORTED_AS = {"pipeline.pyspark_peeklock": "pyspark_peeklock"}  # it is installed under this name
NATIVE = "protocol/native"
LISTED = 15
# From a name in the first column to a brace there; or all of it in one line.
C_FUNCTION = re.compile(r"^[A-Za-z_][^;={}()]*?(\w+)\([^;={}]*\)\s*\{(?:$.*?^\}|[^\n]*\}$)", re.MULTILINE | re.DOTALL)


class Function(NamedTuple):
    lines: int
    name: str
    module: str


class Module(NamedTuple):
    name: str
    folder: str
    lines: int
    functions: tuple[Function, ...]
    imports: frozenset[str]  # full names, as written


def read(root: Path) -> dict[str, Module]:
    """All modules of the packages below `root`, and its files of C, by name."""
    modules = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            relative = path.relative_to(root)
            name = _name(".".join(part for part in relative.with_suffix("").parts if part != "__init__"))
            text = path.read_text()
            tree = ast.parse(text)
            functions = tuple(
                Function((node.end_lineno or node.lineno) - node.lineno + 1, node.name, name)
                for node in ast.walk(tree)
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            )
            imports = frozenset(_imports(tree))
            modules[name] = Module(name, str(relative.parent), len(text.splitlines()), functions, imports)
    for path in sorted((root / NATIVE).glob("*.[ch]")):
        name, text = f"{NATIVE}/{path.name}", path.read_text()
        functions = tuple(Function(found[0].count("\n") + 1, found[1], name) for found in C_FUNCTION.finditer(text))
        modules[name] = Module(name, NATIVE, len(text.splitlines()), functions, frozenset())
    return modules


def _name(module: str) -> str:
    """By which it is imported."""
    for place, name in IMPORTED_AS.items():
        if module == place or module.startswith(f"{place}."):
            return name + module.removeprefix(place)
    return module


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def graph(modules: dict[str, Module]) -> dict[str, set[str]]:
    """The modules that each module imports."""
    found: dict[str, set[str]] = {}
    for name, module in modules.items():
        targets = (each if each in modules else each.rpartition(".")[0] for each in module.imports)
        found[name] = {target for target in targets if target in modules and target != name}
    return found


def between_neighbours(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """Modules and folders that are side by side in a folder and import each other's contents."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, targets in edges.items():
        for target in targets:
            source, goal = name.split("."), target.split(".")
            common = next((at for at, pair in enumerate(zip(source, goal, strict=False)) if pair[0] != pair[1]), None)
            if common is not None:  # else one is the package that the other is in
                found[".".join(source[: common + 1])].add(".".join(goal[: common + 1]))
    return dict(found)


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one node (Tarjan), each in alphabetical order."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(edges.get(node, ())):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            at = stack.index(node)
            component = sorted(stack[at:])
            del stack[at:]
            if len(component) > 1:
                found.append(component)

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return sorted(found)


def sheet(root: Path) -> str:
    modules = read(root)
    edges = graph(modules)
    counts = Counter(module.folder for module in modules.values() if module.lines)
    lines = Counter[str]()
    for module in modules.values():
        lines[module.folder] += module.lines
    functions = sorted((each for module in modules.values() for each in module.functions), reverse=True)
    longest = sorted(modules.values(), key=lambda module: -module.lines)
    text = [f"{sum(counts.values())} modules, {sum(lines.values())} lines, {len(functions)} functions", ""]
    text += ["modules  lines  folder", *(f"{counts[name]:7}  {lines[name]:5}  {name}" for name in sorted(counts))]
    text += ["", "lines  module", *(f"{module.lines:5}  {module.name}" for module in longest[:LISTED])]
    text += ["", "lines  function", *(f"{each.lines:5}  {each.module}.{each.name}" for each in functions[:LISTED])]
    middle = sorted(each.lines for each in functions)[len(functions) // 2] if functions else 0
    text.append(f"{middle:5}  is the median")
    for what, found in (("modules", circles(edges)), ("neighbours", circles(between_neighbours(edges)))):
        text += ["", f"{len(found)} circles of {what}", *("  " + " - ".join(circle) for circle in found)]
    return "\n".join(text)


if __name__ == "__main__":
    print(sheet(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1])))
