"""Which modules there are, and what each imports, by reading the sources."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOP_LEVEL = "pipeline.pyspark_peeklock"  # installed as a package of its own, because Spark finds it by its name
SHIPPED = ("protocol", "storage", "broker", "pipeline")


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def modules(*packages: str) -> Iterator[tuple[str, Path]]:
    """Full names and files of all modules in these packages."""
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            if ".build" in path.parts:  # SDKs that tests have installed
                continue
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(part for part in parts if part != "__init__")
            yield name.removeprefix("pipeline.") if is_within(name, TOP_LEVEL) else name, path


def imports(tree: ast.AST, module: str, is_package: bool) -> set[str]:
    """Full names of all that is imported anywhere: of `from a.b import c`, a.b.c."""
    return imports_of(ast.walk(tree), module, is_package)


def imports_of(nodes: Iterable[ast.AST], module: str, is_package: bool) -> set[str]:
    """As `imports`, of these nodes alone."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = module.split(".") if is_package else module.split(".")[:-1]
                parent = parent[: len(parent) - node.level + 1]
                base = ".".join([*parent, base]) if base else ".".join(parent)
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found
