"""The sheet of structure, on sources made up for it."""

import pytest

from bench.structure import between_neighbours, circles, graph, read, sheet

C = """\
#define TWO(x) (x)

struct pair {
    int first, second;
};

static const struct pair PAIRS[] = {
    {TWO(1), 2},
};

int add(int a, int b) {
    if (a) {
        return b;
    }
    return 0;
}

static struct pair *pair_of(
    int first,
    int second
) {
    return NULL;
}
"""


@pytest.fixture
def sources(tmp_path):
    texts = {
        "broker/__init__.py": "",
        "broker/a.py": "from broker.inner.b import f\n",
        "broker/inner/__init__.py": "",
        "broker/inner/b.py": "import broker.c\n\n\ndef f():\n    def g():\n        pass\n    return g\n",
        "broker/c.py": "def late():\n    from broker import a\n    return a\n",
        "storage/d.py": "from broker.c import late\n",
        "pipeline/pyspark_peeklock/e.py": "from pyspark_peeklock.f import g\n",
        "pipeline/pyspark_peeklock/f.py": "import pyspark_peeklock.e\n",
        "protocol/native/g.h": "int add(int a, int b);\n\nstatic int one(void) { return 1; }\n",
        "protocol/native/g.c": C,
        "protocol/native/xxhash/theirs.h": "int theirs(void) {\n}\n",
    }
    for name, text in texts.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_circles_of_modules_and_of_neighbours_are_found(sources):
    modules = read(sources)
    edges = graph(modules)
    package = ["pyspark_peeklock.e", "pyspark_peeklock.f"]
    assert circles(edges) == [["broker.a", "broker.c", "broker.inner.b"], package]
    assert circles(between_neighbours(edges)) == [["broker.a", "broker.c", "broker.inner"], package]


def test_functions_of_c_are_found_with_their_lines(sources):
    modules = read(sources)
    assert [(each.name, each.lines) for each in modules["protocol/native/g.h"].functions] == [("one", 1)]
    functions = modules["protocol/native/g.c"].functions
    assert [(each.name, each.lines) for each in functions] == [("add", 6), ("pair_of", 6)]
    assert not [name for name in modules if "theirs" in name]


def test_the_sheet_counts_modules_and_functions(sources):
    text = sheet(sources)
    assert text.startswith("8 modules, 40 lines, 6 functions\n")
    assert "    4  broker.inner.b.f\n" in text
    assert "    6  protocol/native/g.c.add\n" in text
    assert "      2     26  protocol/native\n" in text
    assert "      2      2  pipeline/pyspark_peeklock\n" in text
    assert "2 circles of modules\n  broker.a - broker.c - broker.inner.b" in text
