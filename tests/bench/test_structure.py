"""The sheet of structure, on sources made up for it."""

import pytest

from bench.structure import between_neighbours, circles, graph, read, sheet


@pytest.fixture
def sources(tmp_path):
    texts = {
        "broker/__init__.py": "",
        "broker/a.py": "from broker.inner.b import f\n",
        "broker/inner/__init__.py": "",
        "broker/inner/b.py": "import broker.c\n\n\ndef f():\n    def g():\n        pass\n    return g\n",
        "broker/c.py": "def late():\n    from broker import a\n    return a\n",
        "storage/d.py": "from broker.c import late\n",
    }
    for name, text in texts.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_circles_of_modules_and_of_neighbours_are_found(sources):
    modules = read(sources)
    edges = graph(modules)
    assert circles(edges) == [["broker.a", "broker.c", "broker.inner.b"]]
    assert circles(between_neighbours(edges)) == [["broker.a", "broker.c", "broker.inner"]]


def test_the_sheet_counts_modules_and_functions(sources):
    text = sheet(sources)
    assert text.startswith("4 modules, 12 lines, 3 functions\n")
    assert "    4  broker.inner.b.f\n" in text
    assert "1 circles of modules\n  broker.a - broker.c - broker.inner.b" in text
