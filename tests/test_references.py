"""References resolve: what sources and documents cite by an id or a section is on the page that holds it, links lead
somewhere, and the index of docs/ has each page."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "references.md"
FOLDERS = ("broker", "protocol", "storage", "pipeline", "bench", "tests", "docs", "deploy")
SUFFIXES = {".py", ".md", ".lark", ".toml", ".java", ".go", ".mjs", ".js", ".c"}

NUMBER = r"\d+(?:\.\d+)*"
SECTION = re.compile(rf"\b(amqp|management)\.md ({NUMBER}(?:(?:, | and | to ){NUMBER})*)")
ID = re.compile(r"\b(?:ST|DL|PE|PN)\d{1,2}\b")


def sources():
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            built = {".build", "node_modules", "target", "__pycache__"}.intersection(path.parts)
            if path.suffix in SUFFIXES and not built and path not in (PAGE, Path(__file__)):
                yield path


def cited(text: str) -> set[str]:
    """Ids, and sections as "amqp.md 8.4"; of a range its ends."""
    text = re.sub(r"\s+(?:#|//|\*)?\s*", " ", text)
    sections = {
        f"{match[1]}.md {number}" for match in SECTION.finditer(text) for number in re.findall(NUMBER, match[2])
    }
    return sections | set(ID.findall(text))


def defined(page: str) -> set[str]:
    headings = re.findall(rf"^### ((?:amqp|management)\.md {NUMBER})\b", page, re.MULTILINE)
    rows = re.findall(r"^\| ((?:ST|DL|PE|PN)\d+) \|", page, re.MULTILINE)
    return {*headings, *rows}


def test_every_reference_is_on_the_page():
    known = defined(PAGE.read_text())
    missing = {
        f"{path.relative_to(ROOT)}: {reference}"
        for path in sources()
        for reference in cited(path.read_text(errors="replace")) - known
    }
    assert sorted(missing) == []


def test_the_page_defines_nothing_twice():
    page = PAGE.read_text()
    found = re.findall(rf"^### ((?:amqp|management)\.md {NUMBER})\b|^\| ((?:ST|DL)\d+) \|", page, re.MULTILINE)
    assert len(found) == len(set(found))


@pytest.mark.parametrize(
    ("text", "references"),
    [
        ("as SDKs do (amqp.md 8.4 and 9).", {"amqp.md 8.4", "amqp.md 9"}),
        ("# after management.md\n# 3.3 to 3.6.", {"management.md 3.3", "management.md 3.6"}),
        ("lost (ST13, DL6), PT30S, http2", {"ST13", "DL6"}),
        ("AMQP 1.0, 2.7.1", set()),
    ],
)
def test_what_counts_as_a_reference(text, references):
    assert cited(text) == references


PATH = re.compile(r"`((?:broker|protocol|storage|pipeline|bench|tests|deploy|docs)/[\w./-]+\.(?:py|md|toml|c))`")
MODULE = re.compile(r"`((?:broker|protocol|storage|pipeline)(?:\.[a-z_]+)+)(?:\.[A-Z]\w*)?`")


def is_module_or_name(dotted: str) -> bool:
    """A package, a module, or a function or constant of one."""
    parts = dotted.split(".")
    for length in (len(parts), len(parts) - 1):
        path = ROOT.joinpath(*parts[:length])
        if path.with_suffix(".py").is_file():
            return length == len(parts) or parts[-1] in path.with_suffix(".py").read_text()
        if length == len(parts) and path.is_dir():
            return True
    return False


def test_files_and_modules_that_are_named_exist():
    missing = set()
    for path in [*sources(), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", PAGE]:
        if path.suffix in (".py", ".md"):
            text = path.read_text()
            wrong = [name for name in PATH.findall(text) if not (ROOT / name).exists()]
            wrong += [name for name in MODULE.findall(text) if not is_module_or_name(name)]
            missing |= {f"{path.relative_to(ROOT)}: {name}" for name in wrong}
    assert sorted(missing) == []


DOCS = ROOT / "docs"
INDEX = DOCS / "README.md"
CODE = re.compile(r"^( *)```.*?^\1```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
SECTION_OF_PAGE = re.compile(r"\b(docs/[\w./-]+\.md)#([\w-]+)")


def documents() -> Iterator[Path]:
    """All pages of ours."""
    yield from sorted(ROOT.glob("*.md"))
    yield from (path for path in sources() if path.suffix == ".md")
    yield PAGE


def anchors(page: str) -> set[str]:
    """What `#` can name in a page: its headings, as GitHub spells them."""
    seen: Counter[str] = Counter()
    found = set()
    text = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    for heading in re.findall(r"^#+ (.*)", text, re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def broken_links(path: Path, text: str) -> list[str]:
    """Links of a page to files or headings that are not there. What other servers have is not looked at."""
    broken = []
    for target in LINK.findall(CODE.sub("", text)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        goal = path.parent / name if name else path
        if not goal.exists() or (anchor and goal.suffix == ".md" and anchor not in anchors(goal.read_text())):
            broken.append(target)
    return broken


def test_links_lead_to_pages_and_headings_that_exist():
    found = {str(path.relative_to(ROOT)): broken_links(path, path.read_text()) for path in documents()}
    assert {path: broken for path, broken in found.items() if broken} == {}


def test_sections_that_comments_name_exist():
    missing = {
        f"{path.relative_to(ROOT)}: {page}#{anchor}"
        for path in sources()
        if path.suffix != ".md"
        for page, anchor in SECTION_OF_PAGE.findall(path.read_text(errors="replace"))
        if not (ROOT / page).exists() or anchor not in anchors((ROOT / page).read_text())
    }
    assert sorted(missing) == []


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("[a](failures.md), [b](failures.md#what-users-of-sdks-wait), [c](https://example.org/x#y)", []),
        ("[a](gone.md)", ["gone.md"]),
        ("[a](failures.md#gone) and [b](#all-pages)", ["failures.md#gone"]),
        ("`[a](gone.md)`\n\n```\n[b](gone.md)\n```\n", []),
    ],
)
def test_a_broken_link_is_found(text, broken):
    assert broken_links(INDEX, text) == broken


def test_the_index_has_each_page_once():
    listed = [(DOCS / target).resolve() for target in LINK.findall(INDEX.read_text())]
    pages = {path for path in documents() if DOCS in path.parents and path != INDEX}
    assert sorted(str(path.relative_to(DOCS)) for path in pages - set(listed)) == []
    assert [str(path) for path, count in Counter(listed).items() if count > 1] == []
